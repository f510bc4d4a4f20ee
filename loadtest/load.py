"""What a benchmark asks of a server: prompts of exact lengths, none alike, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from loadtest.sse_client import Answer

Ask = Callable[[bytes], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` requests at a time of `input_len` tokens each, behind `shared_len` that a round has in common."""

    concurrency: int
    input_len: int
    output_len: int
    shared_len: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """16x128/64 is 16 at a time, 128 tokens in, 64 out; 8x512+64/32 has a prefix of 512 in common. ValueError."""
        match = re.fullmatch(r"([1-9]\d*)x(?:(\d+)\+)?([1-9]\d*)/([1-9]\d*)", text)
        if match is None:
            raise ValueError(
                f"a workload is CONCURRENCYxINPUT/OUTPUT, as in 16x128/64 or 8x512+64/32, not {text!r}"
            )
        concurrency, shared_len, input_len, output_len = (
            int(number or 0) for number in match.groups()
        )
        return cls(concurrency, input_len, output_len, shared_len)

    @property
    def n_prompt_tokens(self) -> int:
        return self.shared_len + self.input_len

    def __str__(self) -> str:
        shared = f"{self.shared_len}+" if self.shared_len else ""
        return f"{self.concurrency}x{shared}{self.input_len}/{self.output_len}"


SUITE = tuple(
    map(
        Workload.parse, ("1x128/64", "4x128/64", "16x128/64", "1x512/32", "8x512/32", "8x512+64/32")
    )
)


class Prompts:
    """Request bodies whose prompts are random token ids; no two prompts of one object are alike.

    Ids come from the upper half of the vocabulary: special tokens and single bytes, which need not show as text, are
    at its beginning.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self._ids = (vocab_size // 2, vocab_size)

    def bodies(self, workload: Workload, n: int, extra: dict[str, Any]) -> list[bytes]:
        """n requests, encoded ahead of time; what they share is new each time."""
        shared = self._draw(workload.shared_len)
        common = {
            "max_tokens": workload.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompts = (shared + self._draw(workload.input_len) for _ in range(n))
        return [json.dumps({"prompt": prompt} | common | extra).encode() for prompt in prompts]

    def _draw(self, n: int) -> list[int]:
        ids: list[int] = self.generator.integers(*self._ids, size=n).tolist()
        return ids


async def closed_loop(ask: Ask, bodies: Iterable[bytes], concurrency: int) -> list[Answer]:
    """`concurrency` clients, each of which sends its next request when the last is answered."""
    waiting = iter(bodies)

    async def client() -> list[Answer]:
        return [await ask(body) for body in waiting]

    return [
        answer
        for answers in await asyncio.gather(*(client() for _ in range(concurrency)))
        for answer in answers
    ]


async def open_loop(
    ask: Ask, bodies: list[bytes], rate: float, generator: np.random.Generator
) -> list[Answer]:
    """Requests arrive `rate` times a second, as a Poisson process, however many are still unanswered."""
    now = asyncio.get_running_loop().time
    due, requests = now(), []
    for body, gap in zip(bodies, generator.exponential(1 / rate, len(bodies)), strict=True):
        due += gap
        await asyncio.sleep(due - now())
        requests.append(asyncio.ensure_future(ask(body)))
    return await asyncio.gather(*requests)
