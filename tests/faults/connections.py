"""Clients that use a connection as none should: they pipeline, half-close, or do not read."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from tests.faults.client import (
    CLOSED,
    LIMIT,
    Answer,
    Connection,
    Site,
    ask,
    connected,
    post,
    statuses_of,
)
from tests.faults.report import Report
from tests.faults.victim import KEY

_HEADS = 8000  # 242 KiB of the shortest one
_PROBES = 20
_TOKENS = 900
_STREAMS = 2  # of the watch
_PAUSE = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER that closes with a reset
_TINY = b'{"prompt":"a"}'
_STATIC = b"GET /static/app.js HTTP/1.1\r\n\r\n"
_PIPELINED = (
    b"GET /static/%2e%2e/%2e%2e/etc HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(_TINY), _TINY),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)


async def pipelined(site: Site, n: int, report: Report) -> None:
    """Send 8,000 heads on each of n connections at once, and read nothing meanwhile."""
    await _pipeline(site, [_STATIC] * n, report)


async def pipelined_others(site: Site, n: int, report: Report) -> None:
    """Do the same with other paths, with POSTs, and without a key."""
    await _pipeline(site, site.chance.choices(_PIPELINED, k=n), report)


async def _pipeline(site: Site, requests: list[bytes], report: Report) -> None:
    async with AsyncExitStack() as stack:
        held: list[Connection] = []
        for request in requests:
            reader, writer = await stack.enter_async_context(connected(site, unread=True))
            writer.write(request * _HEADS)
            held.append((reader, writer))
        for _ in range(_PROBES):
            report.answered((await probe(site)).status, "a probe", 200)
        for _, writer in held:
            writer.transport.resume_reading()  # type: ignore[attr-defined]
        for statuses in await asyncio.gather(*(statuses_of(reader) for reader, _ in held)):
            for status in statuses or [CLOSED]:
                report.answered(status, "a pipelined request", *range(200, 500), 503, CLOSED)


async def half_closed(site: Site, n: int, report: Report) -> None:
    """Close the sending side after each request: it is answered all the same."""
    bodies = ({"max_tokens": 5}, {"max_tokens": 300}, {"max_tokens": 50, "stream": True})
    for i in range(n):
        body = {"prompt": "def read", "ignore_eos": True} | site.chance.choice(bodies)
        request = post("/v1/completions", body) if i % 4 else post("/version", b"", method="GET")
        report.answered((await ask(site, request, half_close=True)).status, "half-closed", 200)


async def slow_readers(site: Site, n: int, report: Report) -> None:
    """Connect n clients that read nothing of large streams: the server cuts them off."""
    fields = {"n": 16, "logprobs": 20, "stream": True, "max_tokens": _TOKENS, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        for _ in range(n):
            _, writer = await stack.enter_async_context(connected(site, unread=True))
            writer.write(post("/v1/completions", {"prompt": "a"} | fields))
            report.tried += 1
        answer = await ask(site, post("/v1/completions", {"prompt": "a", "max_tokens": 5}))
        report.answered(answer.status, "a client that reads", 200, 429)
        until = perf_counter() + LIMIT
        while (left := await site.n_running()) > _STREAMS and perf_counter() < until:  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(_PAUSE)
        report.check(left <= _STREAMS, f"{left:.0f} sequences of clients that do not read run on")


async def disconnects(site: Site, n: int, report: Report) -> None:
    """Disconnect n clients connecting, uploading, queued, before the first token, in mid-stream."""
    places = asyncio.Semaphore(50)

    async def client() -> None:
        async with places:
            await _disconnect(site, site.chance)
            report.tried += 1

    await asyncio.gather(*(client() for _ in range(n)))


async def _disconnect(site: Site, chance: random.Random) -> None:
    """Send a request or a part of it, wait or read a little, then close or reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    request = _random_request(chance)
    is_whole = chance.random() < 0.8
    writer.write(request if is_whole else request[: chance.randrange(len(request))])
    for _ in range(chance.choice((0, 1, 10, 100))):
        await asyncio.sleep(0)
    if is_whole and chance.random() < 0.5:
        await reader.readexactly(chance.randrange(1, 50))
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


def _random_request(chance: random.Random) -> bytes:
    n_tokens = chance.randint(1, 40)
    parameters = {"ignore_eos": True, "max_new_tokens": n_tokens}
    common = {"max_tokens": n_tokens, "ignore_eos": True}
    stream = {"prompt": "def read" * 4, "stream": True, "n": chance.randint(1, 3)}
    scored = {"prompt": ["a", "b"], "echo": True, "logprobs": 1}
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", stream | common),
        ("/v1/completions", scored | common),
        ("/generate_stream", {"inputs": "a", "parameters": parameters}),
    )
    return post(*chance.choice(bodies))


async def probe(site: Site) -> Answer:
    """Ask for the server's liveness."""
    return await ask(site, post("/health/live", b"", method="GET"))
