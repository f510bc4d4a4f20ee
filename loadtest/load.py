"""Workloads of a benchmark: different requests of exact lengths, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pydoc_data.topics import topics
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from kvasir.loadtest.client import COMPLETIONS, Answer

Ask = Callable[[bytes], Awaitable[Answer]]
SAME, VECTOR = "same", "vector"
SHORT = 32, 512  # tokens of short prompts in a mix
_MIXED = "long:"
_WORDS_PER_TOKEN = 0.75
_FORM = re.compile(
    rf"([1-9]\d*)x(?:(\d+)\+)?([1-9]\d*)(?:-([1-9]\d*))?/([1-9]\d*|{SAME}|{VECTOR})(?:/([1-9]\d*))?"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of `input_len` tokens after a prefix of `shared_len`, the same for a whole round.

    output_len: tokens of a streamed completion; SAME for a completion in one piece that may become
    as long as its source, as encoder-decoders write it; VECTOR for the embedding of a text.
    longest: inputs have log-uniform lengths up to it; 0 if all have the same. mixed: one request in
    ten has such an input, and the others one of SHORT tokens.
    """

    concurrency: int
    input_len: int
    output_len: int | str
    shared_len: int = 0
    longest: int = 0
    beams: int = 1
    mixed: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `16x128/64`, `8x512+64/32`, `long:8x4096-16384/32`, `16x8-64/same/4` or the like.

        Raises ValueError for anything else.
        """
        mixed = text.startswith(_MIXED)
        match = _FORM.fullmatch(text.removeprefix(_MIXED))
        if match is None:
            form = "CONCURRENCYxINPUT/OUTPUT, as in 16x128/64, 8x512+64/32 or 16x8-256/vector"
            raise ValueError(f"a workload is {form}, not {text!r}")
        concurrency, shared, n_in, longest, beams = (int(match[i] or 0) for i in (1, 2, 3, 4, 6))
        n_out = match[5] if match[5] in (SAME, VECTOR) else int(match[5])
        most = int(len(english_words()) / _WORDS_PER_TOKEN)
        refusals = {
            "beams are for the output 'same', as in 16x8-64/same/4": beams and n_out != SAME,
            "a mix is of streams with a range of long prompts, as in long:8x4096-16384/32": (
                mixed and (shared or not longest or isinstance(n_out, str))
            ),
            "a vector is of one text; leave out the shared prefix": shared and n_out == VECTOR,
            f"the range ends below its beginning; write {longest}-{n_in}": 0 < longest < n_in,
            f"a text to embed has fewer than {most} tokens; shorten it": (
                n_out == VECTOR and max(n_in, longest) >= most
            ),
        }
        for reason, is_so in refusals.items():
            if is_so:
                raise ValueError(f"workload {text!r}: {reason}")
        return cls(concurrency, n_in, n_out, shared, longest, beams or 1, mixed)

    def __str__(self) -> str:
        shared = f"{self.shared_len}+" if self.shared_len else ""
        longest = f"-{self.longest}" if self.longest else ""
        beams = f"/{self.beams}" if self.beams > 1 else ""
        lengths = f"{shared}{self.input_len}{longest}/{self.output_len}"
        return f"{_MIXED if self.mixed else ''}{self.concurrency}x{lengths}{beams}"

    @property
    def route(self) -> str:
        """The path that is asked."""
        return "/v1/embeddings" if self.output_len == VECTOR else COMPLETIONS

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens in and out of every request, or None if they differ."""
        if isinstance(self.output_len, str) or self.longest:
            return None
        return self.shared_len + self.input_len, self.output_len

    def inputs(self, n: int) -> NDArray[np.float64]:
        """Return the lengths of n inputs, in any order."""
        n_long = -(-n // 10) if self.mixed else n
        lengths = np.geomspace(self.input_len, self.longest or self.input_len, n_long).round()
        return np.append(np.geomspace(*SHORT, n - n_long).round(), lengths)

    @property
    def n_requests(self) -> int:
        """Requests of a round, unless a plan has another number."""
        if self.mixed:
            return max(30, 3 * self.concurrency)
        return max(30, 12 * self.concurrency) if self.output_len == VECTOR else 3 * self.concurrency


@cache
def english_words() -> list[str]:
    """Return the words of Python's manual in their order.

    Rare words are left out: a text with many of them would have more tokens than models take.
    """
    words = re.findall(r"(?<!\S)[a-z]{1,10}(?!\S)", " ".join(topics.values()))
    counts = Counter(words)
    return [word for word in words if counts[word] >= 5]


SUITES = {
    name: [Workload.parse(text) for text in texts.split()]
    for name, texts in {
        "text": "1x128/64 4x128/64 16x128/64 1x512/32 8x512/32 8x512+64/32",
        "seq2seq": "16x8-64/same 1x8-64/same 16x8-64/same/4",
        "embed": "16x8-256/vector 1x16/vector",
    }.items()
}


class Prompts:
    """A source of request bodies, no two of them equal.

    Prompts are random token ids. The lower half of the vocabulary is not used: it holds the special
    tokens and single bytes, which may decode to no text. Texts to embed are English words.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def bodies(self, workload: Workload, n: int, extra: dict[str, Any]) -> list[bytes]:
        """Encode n requests with the fields `extra`. Each call draws a new shared prefix.

        Lengths that vary are the same in each call, in another order.
        """
        shared = self._draw(workload.shared_len)
        lengths = self.generator.permutation(workload.inputs(n))
        return [
            json.dumps(self._body(workload, shared, int(n_in)) | extra).encode() for n_in in lengths
        ]

    def _body(self, workload: Workload, shared: list[int], n_in: int) -> dict[str, Any]:
        if workload.output_len == VECTOR:
            words, n = english_words(), max(1, round(n_in * _WORDS_PER_TOKEN))
            start = int(self.generator.integers(len(words) - n))
            return {"input": " ".join(words[start : start + n]), "encoding_format": "float"}
        n_out = n_in if workload.output_len == SAME else workload.output_len
        body = {"prompt": shared + self._draw(n_in), "max_tokens": n_out, "temperature": 0}
        if workload.beams > 1:
            return body | {"num_beams": workload.beams}
        if workload.output_len == SAME:
            return body
        usage = {"include_usage": True}
        return body | {"ignore_eos": True, "stream": True, "stream_options": usage}

    def _draw(self, n: int) -> list[int]:
        ids = self.generator.integers(self._vocab_size // 2, self._vocab_size, size=n)
        return cast("list[int]", ids.tolist())


async def closed_loop(ask: Ask, bodies: Iterable[bytes], concurrency: int) -> list[Answer]:
    """Run `concurrency` clients that each send a request when their last one is answered."""
    waiting = iter(bodies)

    async def client() -> list[Answer]:
        return [await ask(body) for body in waiting]

    return list(chain(*await asyncio.gather(*(client() for _ in range(concurrency)))))


async def open_loop(
    ask: Ask, bodies: list[bytes], rate: float, generator: np.random.Generator
) -> list[Answer]:
    """Send requests as a Poisson process, `rate` a second, without waiting for answers."""
    now = asyncio.get_running_loop().time
    due, requests = now(), []
    for body, gap in zip(bodies, generator.exponential(1 / rate, len(bodies)), strict=True):
        due += gap
        await asyncio.sleep(due - now())
        requests.append(asyncio.ensure_future(ask(body)))
    return await asyncio.gather(*requests)
