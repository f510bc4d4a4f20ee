"""Requests whose bodies never end, or wait: they take bounded memory, and shut nobody out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from itertools import cycle, islice
from typing import Any

from tests.faults.client import CLOSED, LIMIT, Site, ask, connected, post, statuses_of
from tests.faults.report import Report
from tests.faults.victim import KEY

FILES = 96  # `ulimit -n` of a server of few connections
_CONNECTIONS = FILES - 64
_ANSWERED = _CONNECTIONS - 8  # requests that it answers at once; the rest is for probes
_MOST = 2**22  # bytes of a body
_KEPT = 12  # halves of such bodies that a server holds at once: 24 MiB
_PROBES = ("/health/live", "/health/ready", "/metrics", "/metrics/router")
_BEGUN = b"POST /v1/completions HTTP/1.1\r\n"
_VALID = post("/v1/completions", {"prompt": "a", "max_tokens": 1})
_FILLER = "x" * (_MOST - 500)


def _head(n_body: int) -> bytes:
    return _BEGUN + f"Authorization: Bearer {KEY}\r\nContent-Length: {n_body}\r\n\r\n".encode()


async def unfinished_bodies(site: Site, n: int, report: Report) -> None:
    """Send half of the largest body on each of n connections, more than there is memory for.

    All halves beyond those that there is memory for are refused, and no more.
    """
    refused = asyncio.Semaphore(0)
    statuses: list[int] = []

    async def send() -> None:
        async with connected(site) as (reader, writer):
            writer.write(_head(_MOST) + bytes(_MOST // 2 - len(_VALID)))
            statuses.extend(await statuses_of(reader) or [CLOSED])
            refused.release()

    sending = [asyncio.create_task(send()) for _ in range(n)]
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT):
            for _ in range(n - _KEPT):
                await refused.acquire()
    report.answered((await ask(site, _VALID)).status, "a small body beside them", 200)
    for one in sending:
        one.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    for status in statuses:
        report.answered(status, "half of a body", 503)
    report.tried += n - len(statuses)
    report.check(len(statuses) == max(0, n - _KEPT), f"{len(statuses)} of {n} halves got an answer")


async def slow_senders(site: Site, n: int, report: Report) -> None:
    """Fill a server of few connections with slow senders, and then with requests that run."""
    async with AsyncExitStack() as stack:
        for i in range(n):
            _, writer = await stack.enter_async_context(connected(site))
            writer.write(_head(9) + b"{" if i % 2 else _BEGUN)
            await _probe(site, _PROBES[i % len(_PROBES)], report)
        report.answered((await ask(site, _VALID)).status, "a request beside them", 200)
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
    running = [asyncio.ensure_future(ask(site, post("/v1/completions", body))) for _ in range(n)]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)  # the crowd has connected
    for _ in range(8):
        for path in _PROBES:
            await _probe(site, path, report)
    for answer in await asyncio.gather(*running):
        report.answered(answer.status, "a request of a crowd", 200, 429, 503, CLOSED)
    # Two connections are the streams' and one the prober's.
    fit = report.statuses[200] - 8 * len(_PROBES) - n - 1
    report.note = f"{fit} of the crowd of {n} answered"
    report.check(fit >= _ANSWERED - 4, report.note)


async def _probe(site: Site, path: str, report: Report) -> None:
    status = (await ask(site, post(path, b"", method="GET"))).status
    report.answered(status, f"a probe of {path}", 200)


async def waiting_bodies(site: Site, n: int, report: Report) -> None:
    """Let n requests run and wait, each with a body of the largest size, and then leave."""
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": _FILLER}}
    text = {"prompt": "a", "metadata": {"x": _FILLER}}
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
    )
    async with AsyncExitStack() as stack:
        for i, (path, body) in enumerate(islice(cycle(kinds), n)):
            fields = {"max_tokens": 900, "ignore_eos": True, "stream": i % 4 > 1}
            _, writer = await stack.enter_async_context(connected(site))
            writer.write(post(path, body | fields))
            await writer.drain()
            report.tried += 1
        report.answered((await ask(site, _VALID)).status, "a request beside them", 200, 429)
