"""Embeddings over HTTP: servers in alternating rounds, in a closed loop and with a lone short text.

Texts are English words, of log-uniform lengths in tokens, a token being three quarters of a word.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np
import uvloop

from loadtest.local_server import serve_locally
from model.progress import Progress, followed, unheard

_WORDS_PER_TOKEN = 0.75
_SHORT = 16  # tokens of the lone text
_N_SHORT = 30  # of them in a round
_WORDS = [word for word in " ".join(topics.values()).split() if word.isalpha()]


@dataclass(frozen=True, slots=True)
class Plan:
    """The texts of a round: `requests` of them, by `concurrency` clients. lengths: in tokens."""

    concurrency: int = 16
    requests: int = 200
    lengths: tuple[int, int] = (8, 256)
    rounds: int = 3
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EmbedFigures:
    """The medians of rounds: of the closed loop, and the milliseconds of a lone short text."""

    server: str
    texts_per_second: float
    tokens_per_second: float
    p50_ms: float
    p95_ms: float
    short_p50_ms: float


class _Client:
    """One connection to a server's endpoint, kept open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        root = parts.path.rstrip("/").removesuffix("/v1")
        self._head = (
            f"POST {root}/v1/embeddings HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\n"
        )

    async def run(self, bodies: Iterable[bytes]) -> list[tuple[float, int]]:
        """Send requests one after the other; return the seconds and the tokens of each."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            return [await self._ask(reader, writer, body) for body in bodies]
        finally:
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> tuple[float, int]:
        sent = perf_counter()
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        _, _, size = head.partition("content-length: ")
        answer = await reader.readexactly(int(size.partition("\r")[0]))
        seconds = perf_counter() - sent
        if " 200 " not in (status := head.partition("\r")[0]):
            raise ConnectionError(f"{status}: {answer[:200].decode()}")
        return seconds, int(json.loads(answer)["usage"]["prompt_tokens"])


def bench_embed(
    addresses: list[str], plan: Plan, progress: Progress = unheard
) -> list[EmbedFigures]:
    """Measure servers, each a URL or a model directory to serve, in turn.

    Raises ValueError for an invalid URL, ChildProcessError for a directory that cannot be served,
    and ConnectionError for a request that is refused.
    """
    with ExitStack() as stack:
        urls = [
            one if "://" in one else stack.enter_context(serve_locally(Path(one)))
            for one in addresses
        ]
        clients = [_Client(url) for url in urls]
        rounds = uvloop.run(_measure(clients, plan, progress))
    return [
        EmbedFigures(address, *(median(of) for of in zip(*figures, strict=True)))
        for address, figures in zip(addresses, rounds, strict=True)
    ]


async def _measure(
    clients: list[_Client], plan: Plan, progress: Progress
) -> list[list[tuple[float, ...]]]:
    generator = np.random.default_rng(plan.seed)
    figures: list[list[tuple[float, ...]]] = [[] for _ in clients]

    def body(n_tokens: int) -> bytes:
        n_words = max(1, round(n_tokens * _WORDS_PER_TOKEN))
        start = int(generator.integers(len(_WORDS) - n_words))
        text = " ".join(_WORDS[start : start + n_words])
        named = {} if plan.model is None else {"model": plan.model}
        return json.dumps({"input": text, "encoding_format": "float"} | named).encode()

    for number in followed(range(plan.rounds + 1), "rounds", progress):
        least, most = np.log(plan.lengths)
        lengths = np.exp(generator.uniform(least, most, plan.requests)).astype(int)
        bodies, short = [body(int(n)) for n in lengths], [body(_SHORT) for _ in range(_N_SHORT)]
        for client, rows in zip(clients, figures, strict=True):
            waiting, began = iter(bodies), perf_counter()
            loops = await asyncio.gather(*(client.run(waiting) for _ in range(plan.concurrency)))
            seconds = perf_counter() - began
            times, tokens = zip(*chain(*loops), strict=True)
            alone = [took for took, _ in await client.run(short)]
            if number:  # the first round warms up
                p50, p95 = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.95))
                speed = len(times) / seconds, sum(tokens) / seconds
                rows.append((*speed, p50, p95, 1e3 * median(alone)))
    return figures
