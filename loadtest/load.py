"""Workloads of a benchmark: different prompts of exact lengths, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, cast

import numpy as np

from kvasir.loadtest.sse_client import StreamedCompletion

Ask = Callable[[bytes], Awaitable[StreamedCompletion]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of `input_len` tokens after a prefix of `shared_len`, the same for a whole round."""

    concurrency: int
    input_len: int
    output_len: int
    shared_len: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `16x128/64` or `8x512+64/32`. Raises ValueError for anything else."""
        match = re.fullmatch(r"([1-9]\d*)x(?:(\d+)\+)?([1-9]\d*)/([1-9]\d*)", text)
        if match is None:
            form = "CONCURRENCYxINPUT/OUTPUT, as in 16x128/64 or 8x512+64/32"
            raise ValueError(f"a workload is {form}, not {text!r}")
        concurrency, shared, n_in, n_out = (int(n or 0) for n in match.groups())
        return cls(concurrency, n_in, n_out, shared)

    def __str__(self) -> str:
        shared = f"{self.shared_len}+" if self.shared_len else ""
        return f"{self.concurrency}x{shared}{self.input_len}/{self.output_len}"


SUITE = tuple(
    Workload.parse(text)
    for text in ("1x128/64", "4x128/64", "16x128/64", "1x512/32", "8x512/32", "8x512+64/32")
)


class Prompts:
    """A source of request bodies whose prompts are random token ids, no two of them equal.

    The lower half of the vocabulary is not used: it holds the special tokens and single bytes,
    which may decode to no text.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def bodies(self, workload: Workload, n: int, extra: dict[str, Any]) -> list[bytes]:
        """Encode n requests with the fields `extra`. Each call draws a new shared prefix."""
        shared = self._draw(workload.shared_len)
        fields = {
            "max_tokens": workload.output_len, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        } | extra  # fmt: skip
        prompts = (shared + self._draw(workload.input_len) for _ in range(n))
        return [json.dumps({"prompt": prompt} | fields).encode() for prompt in prompts]

    def _draw(self, n: int) -> list[int]:
        ids = self.generator.integers(self._vocab_size // 2, self._vocab_size, size=n)
        return cast("list[int]", ids.tolist())


async def closed_loop(
    ask: Ask, bodies: Iterable[bytes], concurrency: int
) -> list[StreamedCompletion]:
    """Run `concurrency` clients that each send a request when their last one is answered."""
    waiting = iter(bodies)

    async def client() -> list[StreamedCompletion]:
        return [await ask(body) for body in waiting]

    return list(chain(*await asyncio.gather(*(client() for _ in range(concurrency)))))


async def open_loop(
    ask: Ask, bodies: list[bytes], rate: float, generator: np.random.Generator
) -> list[StreamedCompletion]:
    """Send requests as a Poisson process, `rate` a second, without waiting for answers."""
    now = asyncio.get_running_loop().time
    due, requests = now(), []
    for body, gap in zip(bodies, generator.exponential(1 / rate, len(bodies)), strict=True):
        due += gap
        await asyncio.sleep(due - now())
        requests.append(asyncio.ensure_future(ask(body)))
    return await asyncio.gather(*requests)
