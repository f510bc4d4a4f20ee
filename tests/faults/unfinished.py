"""Requests whose bodies never end: they take bounded memory, and shut nobody out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from unittest.mock import patch

from tests.fake_runner import TIMEOUT
from tests.faults.canary import apart, canary
from tests.faults.leaks import OF_LARGE_BODIES, check_nothing_leaked, held
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.faults.server_process import post_request
from tests.live import KEY, Live, live

_MOST = 2**22  # bytes of a body
_KEPT = 32  # halves of such bodies that a server holds at once: 64 MiB
_CONNECTIONS = 32  # with `ulimit -n 64`
_ANSWERED = 24  # requests that such a server answers at once; the rest is for probes
_KEY = f"Authorization: Bearer {KEY}"
_PROBES = ("/health/live", "/health/ready", "/metrics", "/metrics/router")
_BEGUN = b"POST /v1/completions HTTP/1.1\r\n"
_VALID = post_request("/v1/completions", {"prompt": "a", "max_tokens": 1}, _KEY)


def unfinished_bodies(n: int, _seed: int = 0) -> Report:
    """Send half of the largest body on each of n connections, more than there is memory for."""
    report = Report("unfinished bodies", n)
    with errors_logged() as errors, live(PacedRunner(), max_body_bytes=_MOST) as served:
        apart(report, _send_halves, served.port, n)
        before = held(served)
        with canary(report, served.port, tokens=50, key=KEY):
            apart(report, _send_halves, served.port, n)
        check_nothing_leaked(report, before, held(served), OF_LARGE_BODIES)
        report.lost += errors
    return report


async def _send_halves(report: Report, port: int, n: int) -> None:
    """Wait for the refusals of all halves beyond those that there is memory for, and no more."""
    refused = asyncio.Semaphore(0)
    statuses = list[int]()

    async def send() -> None:
        async with _sent(port, _head(_MOST)) as (reader, writer):
            writer.write(bytes(_MOST // 2 - len(_VALID)))
            statuses.append(await _status(reader))
            refused.release()

    sending = [asyncio.create_task(send()) for _ in range(n)]
    async with asyncio.timeout(TIMEOUT):
        for _ in range(n - _KEPT):
            await refused.acquire()
        report.check(await _ask(port) == 200, "a small body is not answered beside them")
    for one in sending:
        one.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    expected = [503] * (n - _KEPT)
    report.check(statuses == expected, f"{n} halves of bodies got {statuses}, not {expected}")


def slow_senders(n: int, _seed: int = 0) -> Report:
    """Begin n requests that do not go on, on a server of a few connections, and probe it."""
    report = Report("clients that send nothing more", n)
    few = patch("server.process.serve.max_connections", lambda: _CONNECTIONS)
    with errors_logged() as errors, few, live(PacedRunner(), max_queue=1000) as served:
        asyncio.run(_crowd(served, n, report))
        report.lost += errors
    return report


async def _crowd(served: Live, n: int, report: Report) -> None:
    """Fill the server with slow senders, and then with requests that are being answered."""
    async with asyncio.timeout(TIMEOUT):
        with canary(report, served.port, tokens=50, key=KEY):
            slow = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(n)]
            for i, (_, writer) in enumerate(slow):
                if not writer.is_closing():
                    writer.write(_head(9) + b"{" if i % 2 else _BEGUN)
                await _probe(served, _PROBES[i % len(_PROBES)], report)
            report.check(await _ask(served.port) == 200, "a request is not answered beside them")
        is_empty = served.service.admission.empty.wait()  # the canary's last request has ended
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(is_empty, served.loop))
        served.runner.hold()
        waiting = [asyncio.ensure_future(_ask(served.port)) for _ in range(n)]
        ended = [await one for one in islice(asyncio.as_completed(waiting), n - _ANSWERED)]
        report.check(set(ended) <= {0, 503}, f"requests beyond {_ANSWERED} got {ended}")
        report.note = f"{ended.count(503)} requests got 503, {ended.count(0)} were cut off"
        for path in _PROBES:
            await _probe(served, path, report)
        report.check(await _ask(served.port) == 503, "there is no limit on requests")
        served.runner.release()
        n_answered = (await asyncio.gather(*waiting)).count(200)
        report.check(n_answered == _ANSWERED, f"{n_answered} requests were answered")
        for _, writer in slow:
            writer.close()


async def _probe(served: Live, path: str, report: Report) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    status = await _status(reader)
    report.check(status == 200, f"{path}: {status}")
    writer.close()


def _head(n_body: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{_KEY}\r\nContent-Length: {n_body}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def _sent(
    port: int, begun: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(begun)
        yield reader, writer
    finally:
        writer.close()


async def _ask(port: int) -> int:
    async with _sent(port, _VALID) as (reader, _):
        return await _status(reader)


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer; 0 if the server cuts the connection off instead."""
    try:
        first = await reader.read(2**16)
    except ConnectionError:
        return 0
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", first)
    return int(found[1]) if found else 0
