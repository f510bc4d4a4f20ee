"""Load a server with mixed traffic and find leaks: python -m tests.faults.soak [DIRECTORY]

Prints a line a minute. Exit code 1 if an answer is wrong, or if memory, descriptors, threads or
rows of the KV cache have grown in the end.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any

import httpx
import psutil
import typer

from kvasir.server.process.local_server import serve_locally
from tests.faults.server_process import EXAMPLE, Model

_CLIENTS = 24
_MINUTE = 60.0
_CACHES = ("--kv-cache-memory", "64MiB", "--prefix-cache-memory", "16MiB")  # full by the first line
_GROWTH = 1.05  # of memory since the first line
_CLOSING = 4  # descriptors of connections whose clients have just disconnected
_SHARED = "import json\n\n\ndef read_json(path):\n    return json.load(path)\n\n\n" * 4
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


class Traffic:
    """Clients that send one request after the other. errors: answers with an unexpected status."""

    def __init__(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        self.asked: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.errors: list[str] = []
        self._client, self._chance = client, chance
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._complete, self._stream, self._disconnect, self._score, self._constrain,
            self._generate, self._chat, self._tokenise, self._share_prefix, self._be_invalid,
            self._set_deadline,
        ]  # fmt: skip

    async def send(self, until: float) -> None:
        """Send requests of random kinds until a time of `monotonic`."""
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

    async def _post_completion(self, *expected: int, **fields: Any) -> httpx.Response:
        return await self._post("/v1/completions", self._body(**fields), *expected)

    def _body(self, **fields: Any) -> dict[str, Any]:
        chance = self._chance
        prompt = "def " + "".join(chance.choices("abcdefgh_", k=chance.randint(1, 30)))
        common = {"max_tokens": chance.randint(1, 60), "priority": chance.randint(-2, 2)}
        return {"prompt": prompt} | common | fields

    async def _complete(self) -> None:
        await self._post_completion(n=self._chance.randint(1, 3), logprobs=2, stop=["\n\n"])

    async def _stream(self) -> None:
        answer = await self._post_completion(stream=True)
        if answer.status_code == 200 and not answer.text.endswith("data: [DONE]\n\n"):
            self.errors.append(f"a stream ends with {answer.text[-200:]!r}")

    async def _disconnect(self) -> None:
        """Disconnect in mid-stream, or before it has begun."""
        body = self._body(stream=True, max_tokens=200)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0.0, 0.1)):
                await self._client.post("/v1/completions", json=body)

    async def _score(self) -> None:
        await self._post_completion(echo=True, logprobs=1, max_tokens=0)

    async def _constrain(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
        await self._post_completion(response_format=schema, max_tokens=40)

    async def _generate(self) -> None:
        path = self._chance.choice(("/generate", "/generate_stream"))
        parameters = {"max_new_tokens": 20, "do_sample": True}
        await self._post(path, {"inputs": "def read", "parameters": parameters})

    async def _chat(self) -> None:
        """Chat; a model without a chat template answers 400."""
        body = {"messages": [{"role": "user", "content": "a"}]}
        await self._post("/v1/chat/completions", body, 200, 400, 429)

    async def _tokenise(self) -> None:
        await self._post("/tokenize", {"prompt": _SHARED}, 200)

    async def _share_prefix(self) -> None:
        await self._post_completion(prompt=_SHARED + str(self._chance.random()))

    async def _be_invalid(self) -> None:
        mistakes = ({"temperature": -1}, {"max_tokens": 10**6}, {"stop": 1}, {"surprise": True})
        await self._post_completion(400, **self._chance.choice(mistakes))

    async def _set_deadline(self) -> None:
        deadline = self._chance.randint(1, 200)
        await self._post_completion(200, 429, 504, timeout_ms=deadline, max_tokens=200)


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of the server's process.

    rows: sequences that run or wait, plus the used share of the KV cache.
    """

    memory: int
    descriptors: int
    threads: int
    rows: float

    def __str__(self) -> str:
        counts = (
            f"{self.descriptors:3} descriptors, {self.threads:3} threads, {self.rows:5.2f} rows"
        )
        return f"{self.memory / 2**20:7.1f} MiB, {counts}"


async def held(client: httpx.AsyncClient, server: psutil.Process) -> Held:
    """Measure the server's process."""
    metrics = (await client.get("/metrics/router")).text
    rows = sum(float(value) for value in re.findall(r"^kvasir_\S+ (\S+)$", metrics, re.MULTILINE))
    return Held(server.memory_info().rss, server.num_fds(), server.num_threads(), rows)


async def soak(url: str, server: psutil.Process, seconds: float, seed: int) -> list[str]:
    """Return what is wrong in the end."""
    limits = httpx.Limits(max_keepalive_connections=0)  # idle connections would hold descriptors
    async with httpx.AsyncClient(base_url=url, timeout=_MINUTE, limits=limits) as client:
        traffic = Traffic(client, random.Random(seed))
        end = monotonic() + seconds
        lines = []
        while monotonic() < end:
            until = min(end, monotonic() + min(_MINUTE, seconds / 4))
            await asyncio.gather(*(traffic.send(until) for _ in range(_CLIENTS)))
            lines.append(await held(client, server))
            n_asked, n_errors = traffic.asked.total(), len(traffic.errors)
            typer.echo(f"{lines[-1]}, {n_asked:7} requests, {n_errors} errors")
        first, last = lines[0], await held(client, server)
        typer.echo(f"by kind: {dict(traffic.asked)}; by status: {dict(traffic.statuses)}")
    wrong = traffic.errors[:20]
    if last.memory > _GROWTH * first.memory:
        wrong.append(f"memory grew by {last.memory / first.memory - 1:.1%}")
    if last.descriptors > first.descriptors + _CLOSING or last.threads > first.threads:
        wrong.append("descriptors or threads grew")
    return wrong + ([f"{last.rows:g} rows are still held"] if last.rows else [])


def main(
    model: Model = EXAMPLE,
    seconds: Annotated[float, typer.Option(help="Time of the traffic.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
) -> None:
    """Soak the server in mixed traffic."""
    with serve_locally(model, *_CACHES) as url:
        (server,) = psutil.Process().children()
        wrong = asyncio.run(soak(url, server, seconds, seed))
    typer.echo("\n".join(wrong) or "nothing is left behind")
    raise typer.Exit(int(bool(wrong)))


if __name__ == "__main__":
    typer.run(main)
