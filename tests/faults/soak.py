"""Mixed traffic for a while, and what the server holds meanwhile: python -m tests.faults.soak [MODEL_DIRECTORY].

A line a minute. Exit code 1 where an answer is wrong, or memory, descriptors, threads or rows have grown at the end.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import httpx
import psutil
import typer

from loadtest.local_server import serve_locally

_CLIENTS = 24
_MINUTE = 60.0
_CACHES = ("--kv-cache-memory", "64MiB", "--prefix-cache-memory", "16MiB")  # full by the first line
_GROWTH = 1.05  # of memory since the first line
_CLOSING = 4  # descriptors of connections whose clients have just left
_SHARED = "import json\n\n\ndef read_json(path):\n    return json.load(path)\n\n\n" * 4
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


class Traffic:
    """Clients that ask for one thing after the other. `errors`: answers with a status that is none of the expected."""

    def __init__(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        self.asked: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.errors: list[str] = []
        self._client, self._chance = client, chance
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._complete, self._stream, self._leave, self._score, self._constrain, self._generate, self._chat,
            self._tokenise, self._share, self._mistake, self._hurry,
        ]  # fmt: skip

    async def run(self, until: float) -> None:
        while monotonic() < until:
            kind = self._chance.choice(self._kinds)
            self.asked[kind.__name__] += 1
            try:
                await kind()
            except httpx.HTTPError as error:
                self.errors.append(f"{kind.__name__}: {error!r}")

    async def _post(self, path: str, body: dict[str, Any], *expected: int) -> httpx.Response:
        answer = await self._client.post(path, json=body)
        self.statuses[answer.status_code] += 1
        if answer.status_code not in (expected or (200, 429)):
            self.errors.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        return answer

    def _body(self, **fields: Any) -> dict[str, Any]:
        chance = self._chance
        body = {"prompt": "def " + "".join(chance.choices("abcdefgh_", k=chance.randint(1, 30)))}
        return (
            body | {"max_tokens": chance.randint(1, 60), "priority": chance.randint(-2, 2)} | fields
        )

    async def _complete(self) -> None:
        await self._post(
            "/v1/completions", self._body(n=self._chance.randint(1, 3), logprobs=2, stop=["\n\n"])
        )

    async def _stream(self) -> None:
        answer = await self._post("/v1/completions", self._body(stream=True))
        if answer.status_code == 200 and not answer.text.endswith("data: [DONE]\n\n"):
            self.errors.append(f"a stream ends with {answer.text[-200:]!r}")

    async def _leave(self) -> None:
        """In mid-stream, or before it has begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0.0, 0.1)):
                await self._client.post(
                    "/v1/completions", json=self._body(stream=True, max_tokens=200)
                )

    async def _score(self) -> None:
        await self._post("/v1/completions", self._body(echo=True, logprobs=1, max_tokens=0))

    async def _constrain(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
        await self._post("/v1/completions", self._body(response_format=schema, max_tokens=40))

    async def _generate(self) -> None:
        path = self._chance.choice(("/generate", "/generate_stream"))
        await self._post(
            path, {"inputs": "def read", "parameters": {"max_new_tokens": 20, "do_sample": True}}
        )

    async def _chat(self) -> None:
        """A model without a chat template says so."""
        await self._post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 200, 400, 429
        )

    async def _tokenise(self) -> None:
        await self._post("/tokenize", {"prompt": _SHARED}, 200)

    async def _share(self) -> None:
        await self._post("/v1/completions", self._body(prompt=_SHARED + str(self._chance.random())))

    async def _mistake(self) -> None:
        body = self._chance.choice(
            ({"temperature": -1}, {"max_tokens": 10**6}, {"stop": 1}, {"surprise": True})
        )
        await self._post("/v1/completions", self._body(**body), 400)

    async def _hurry(self) -> None:
        body = self._body(timeout_ms=self._chance.randint(1, 200), max_tokens=200)
        await self._post("/v1/completions", body, 200, 429, 504)


@dataclass(frozen=True, slots=True)
class Held:
    """What the server's process holds. rows: sequences that run or wait, and the share of their memory in use."""

    memory: int
    descriptors: int
    threads: int
    rows: float

    def __str__(self) -> str:
        return (
            f"{self.memory / 2**20:7.1f} MiB, {self.descriptors:3} descriptors, {self.threads:3} threads, "
            f"{self.rows:5.2f} rows"
        )


async def held(client: httpx.AsyncClient, server: psutil.Process) -> Held:
    metrics = (await client.get("/metrics/router")).text
    rows = sum(float(value) for value in re.findall(r"^kvasir_\S+ (\S+)$", metrics, re.MULTILINE))
    return Held(server.memory_info().rss, server.num_fds(), server.num_threads(), rows)


async def soak(url: str, server: psutil.Process, seconds: float, seed: int) -> list[str]:
    """What is wrong in the end."""
    limits = httpx.Limits(
        max_keepalive_connections=0
    )  # no connection is left over: descriptors can be compared
    async with httpx.AsyncClient(base_url=url, timeout=_MINUTE, limits=limits) as client:
        traffic = Traffic(client, random.Random(seed))
        end = monotonic() + seconds
        first: Held | None = None
        while monotonic() < end:
            until = min(end, monotonic() + min(_MINUTE, seconds / 4))
            await asyncio.gather(*(traffic.run(until) for _ in range(_CLIENTS)))
            now = await held(client, server)
            first = first or now
            typer.echo(f"{now}, {traffic.asked.total():7} requests, {len(traffic.errors)} errors")
        assert first is not None
        last = await held(client, server)
        typer.echo(f"by kind: {dict(traffic.asked)}; by status: {dict(traffic.statuses)}")
    wrong = traffic.errors[:20]
    if last.memory > _GROWTH * first.memory:
        wrong.append(f"memory grew by {last.memory / first.memory - 1:.1%}")
    if last.descriptors > first.descriptors + _CLOSING or last.threads > first.threads:
        wrong.append("descriptors or threads grew")
    return wrong + ([f"{last.rows:g} rows are still held"] if last.rows else [])


def main(
    model: Annotated[Path, typer.Argument(help="Model directory.")] = Path("examples/stdlib"),
    seconds: Annotated[float, typer.Option(help="How long.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of what is asked when.")] = 0,
) -> None:
    """Soak the server in mixed traffic."""
    with serve_locally(model, *_CACHES) as url:
        (server,) = psutil.Process().children()
        wrong = asyncio.run(soak(url, server, seconds, seed))
    typer.echo("\n".join(wrong) or "nothing is left behind")
    raise typer.Exit(int(bool(wrong)))


if __name__ == "__main__":
    typer.run(main)
