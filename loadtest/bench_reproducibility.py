"""Equal requests to a server, alone and in a crowd: how many answers differ.

Prompts are English words after prefixes that several share, so that a server's cache has them. Half
of the requests are greedy, half are drawn with a seed. Each is asked alone, its answer in one
piece, which all others should equal: alone and streamed, and both ways beside all the others, in
random order and at random times.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import uvloop
from rich.table import Table

from kvasir.loadtest.client import Answer, Client, Target
from kvasir.loadtest.load import english_words
from kvasir.model.platform.progress import Progress, with_progress
from kvasir.server.process.local_server import serve_locally

SHARED_WORDS = (0, 40, 150)
_OWN_WORDS = (1, 40)
_SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9})
_WAYS = ("alone, streamed", "in a crowd", "in a crowd, streamed")


@dataclass(slots=True)
class Told(Answer):
    """An answer with its text and its tokens' log-probabilities, if there are any."""

    text: str = ""
    logprobs: list[float | None] = field(default_factory=list)

    def _note(self, event: dict[str, Any], now: float) -> None:
        super(Told, self)._note(event, now)
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or ""
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()

    def finish(self, now: float) -> None:
        """Note the end of the response body; a text may be empty."""
        self.ended = now

    def read_whole(self, body: bytes, now: float) -> None:
        """Parse an answer that came in one piece."""
        self.ended = now
        try:
            self._note(json.loads(body), now)
        except (AttributeError, TypeError, ValueError):
            self.fail(f"the answer is not a completion: {body[:100]!r}")


@dataclass(slots=True)
class Row:
    """The number of answers, asked for in one way, that differ from the same requests alone.

    logprobs: None if the server gives none.
    """

    requests: int = 0
    greedy: int = 0
    drawn: int = 0
    logprobs: int | None = None

    def count(self, request: dict[str, Any], answer: Told, alone: Told) -> None:
        """Count an answer to a request, beside that alone."""
        self.requests += 1
        if answer.text != alone.text and request["temperature"]:
            self.drawn += 1
        elif answer.text != alone.text:
            self.greedy += 1
        if alone.logprobs:
            self.logprobs = (self.logprobs or 0) + (answer.logprobs != alone.logprobs)


@dataclass(frozen=True, slots=True)
class Reproducibility:
    """Rows by server and way."""

    seed: int
    servers: dict[str, dict[str, Row]]

    @property
    def n_different(self) -> int:
        """Answers whose text or log-probabilities are not those of the same request alone."""
        rows = [row for ways in self.servers.values() for row in ways.values()]
        return sum(row.greedy + row.drawn + (row.logprobs or 0) for row in rows)

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        return asdict(self) | {"different": self.n_different}

    def tables(self) -> list[Table]:
        """Return a table for each server."""
        tables = []
        for server, ways in self.servers.items():
            table = Table("", title=f"{server}: answers that differ from the same alone")
            for name in ("requests", "greedy texts", "drawn texts", "logprobs"):
                table.add_column(name, justify="right")
            for way, row in ways.items():
                logprobs = "-" if row.logprobs is None else f"{row.logprobs}"
                table.add_row(way, *map(str, (row.requests, row.greedy, row.drawn)), logprobs)
            tables.append(table)
        return tables


def make_requests(n: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return the fields of n requests, greedy and drawn in turn."""
    generator, words = np.random.default_rng(seed), english_words()
    start = int(generator.integers(len(words) // 2))
    requests = []
    for i in range(n):
        shared = words[start : start + SHARED_WORDS[i // 2 % len(SHARED_WORDS)]]
        own = generator.choice(words, int(generator.integers(*_OWN_WORDS))).tolist()
        body = {"prompt": " ".join([*shared, *own]), "max_tokens": max_tokens, "seed": i}
        requests.append(body | _SAMPLINGS[i % 2])
    return requests


def bench_reproducibility(
    servers: list[str],
    requests: list[dict[str, Any]],
    seed: int,
    *,
    timeout: float,
    api_key: str | None,
    progress: Progress,
) -> Reproducibility:
    """Ask servers, given by URL or model directory, one after the other.

    Raises as `bench_serve`, and ConnectionError for a request that fails.
    """
    found = {}
    for server in servers:
        with ExitStack() as stack:
            url = server
            if "://" not in url:
                progress(f"starting {url}", 0, 0)
                url = stack.enter_context(serve_locally(Path(url)))
            client = Client(Target(url, api_key), timeout)
            found[server] = uvloop.run(_compare(client, requests, seed, progress))
    return Reproducibility(seed, found)


async def _compare(
    client: Client, requests: list[dict[str, Any]], seed: int, progress: Progress
) -> dict[str, Row]:
    generator = np.random.default_rng(seed)
    with closing(client):

        async def ask(i: int, *, streams: bool, delay: float = 0.0) -> Told:
            await asyncio.sleep(delay)
            answer = Told()
            body = requests[i] | {"stream": streams}
            await client.ask(json.dumps(body).encode(), answer=answer)
            if answer.error:
                raise ConnectionError(f"{client.target.url} failed a request: {answer.error}")
            return answer

        plain, requests = requests, [body | {"logprobs": 1} for body in requests]
        try:
            await ask(0, streams=False)
        except ConnectionError:  # as from servers that refuse log-probabilities
            requests = plain
        everyone, began = range(len(requests)), perf_counter()
        named = with_progress(everyone, "requests alone", progress)
        alone = [await ask(i, streams=False) for i in named]
        longest = (perf_counter() - began) / 4  # far less than one after the other would take
        named = with_progress(everyone, "requests alone, streamed", progress)
        answers = [(_WAYS[0], i, await ask(i, streams=True)) for i in named]
        progress("requests in a crowd", 0, 0)
        crowd = [(i, streams) for i in everyone for streams in (False, True)]
        crowd = [crowd[place] for place in generator.permutation(len(crowd))]
        delays = generator.uniform(0, longest, len(crowd)).tolist()
        asked = zip(crowd, delays, strict=True)
        told = await asyncio.gather(*(ask(i, streams=s, delay=delay) for (i, s), delay in asked))
        answers += [(_WAYS[1 + s], i, one) for (i, s), one in zip(crowd, told, strict=True)]
    rows = {way: Row() for way in _WAYS}
    for way, i, answer in answers:
        rows[way].count(requests[i], answer, alone[i])
    return rows
