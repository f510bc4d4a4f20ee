"""Clients that send long texts and leave: none of these is read, and other clients are served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import httpx

from server.requests.text_worker import MOST_WAITING, SHORT, THREADS, TextWorker
from tests.fake_runner import TIMEOUT
from tests.faults.canary import canary
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.live import KEY, Live, live, wait

T = TypeVar("T")

_AT_ONCE, _FITTING = 10, 7
_SIZE = MOST_WAITING // _FITTING - 100  # of a prompt; its body is larger


class _Watched:
    """What a worker is asked to do with long texts; the semaphores are for each of them."""

    def __init__(self, worker: TextWorker) -> None:
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.n_read = 0
        self._call = worker.call
        worker.call = self.call  # type: ignore[method-assign]

    async def call(self, size: int, work: Callable[[], T], **options: bool) -> T:
        def counted() -> T:
            self.n_read += size > SHORT
            return work()

        if size > SHORT:
            self.begun.release()
        try:
            return await self._call(size, counted, **options)
        finally:
            if size > SHORT:
                self.ended.release()


def abandoned_texts(n: int) -> Report:
    """Let n clients send long texts while the worker is busy; those that may wait then leave."""
    report = Report("abandoned texts")
    with errors_logged() as errors, live(PacedRunner()) as served:
        watched = _Watched(served.service.text_worker)
        with canary(report, served.port, tokens=50, key=KEY):
            for _ in range(-(-n // _AT_ONCE)):
                asyncio.run(_round(served, watched, report))
        refused = served.value("requests_rejected_total", reason="overloaded_texts")
        report.note = f"{refused:.0f} refused, {report.tried - refused:.0f} left, none of them read"
    report.lost += errors
    return report


async def _round(served: Live, watched: _Watched, report: Report) -> None:
    body = {"prompt": "a" * _SIZE}
    headers = {"authorization": f"Bearer {KEY}"}
    go, before = threading.Event(), watched.n_read
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=TIMEOUT) as client:
        for _ in range(THREADS):
            served.service.text_worker.submit(go.wait, TIMEOUT)
        posts = [
            asyncio.ensure_future(client.post("/tokenize", json=body)) for _ in range(_AT_ONCE)
        ]
        await _wait(watched.begun, _AT_ONCE)
        await _wait(watched.ended, _AT_ONCE - _FITTING)
        for _ in range(_AT_ONCE - _FITTING):
            done, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
            answer = await posts.pop(posts.index(done.pop()))
            report.check(answer.status_code == 429, f"one too many got {answer.text[:200]}")
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        await _wait(watched.ended, _FITTING)
        go.set()
        answer = await client.post("/tokenize", json={"prompt": "def read" * 700})
        report.tried += _AT_ONCE
        report.check(answer.status_code == 200, f"an ordinary text got {answer.text[:200]}")
        await _wait(watched.ended, 2)  # its body and its text
        await _wait(watched.begun, 2)
        n_read = watched.n_read - before - 2
        report.check(n_read == 0, f"{n_read} texts of clients that had left were read")


async def _wait(semaphore: threading.Semaphore, n: int) -> None:
    for _ in range(n):
        await asyncio.to_thread(wait, semaphore)
