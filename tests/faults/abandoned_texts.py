"""Clients that send long texts and leave: nothing of theirs is computed, and others are served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx

from server.requests.text_worker import MOST_WAITING, SHORT, THREADS
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.faults.report import Report, errors_logged
from tests.faults.server_process import post_request
from tests.live import KEY, Live, live
from tests.serving import VOCAB_SIZE

_SIZE = MOST_WAITING // 8
_KEY = f"Authorization: Bearer {KEY}"


def abandoned_texts(n: int) -> Report:
    """Let n clients send a long text each while others are read; those that wait then leave."""
    report = Report("abandoned texts")
    with errors_logged() as errors, live(FakeRunner(VOCAB_SIZE)) as served:
        asyncio.run(_send_all(served, n, report))
    report.lost += errors
    return report


async def _send_all(served: Live, n: int, report: Report) -> None:
    n_refused = n_read = 0
    for _ in range(0, n, 10):
        go, watched = threading.Event(), _Watched(served)
        for _ in range(THREADS):
            served.service.text_worker.submit(go.wait, TIMEOUT)
        clients = [await _send(served.port) for _ in range(10)]
        refused = [await _status(reader) for reader, _ in clients[:0]]
        report.tried += len(clients)
        await asyncio.to_thread(watched.wait, watched.begun, 10)
        for _, writer in clients:
            writer.close()
        await asyncio.to_thread(watched.wait, watched.ended, 10)
        go.set()
        n_refused += len(refused)
        n_read += watched.n_computed
        async with httpx.AsyncClient(timeout=TIMEOUT, headers={"authorization": f"Bearer {KEY}"}) as c:
            answer = await c.post(f"{served.url}/tokenize", json={"prompt": "def read " * 1000})
        report.check(answer.status_code == 200, f"an ordinary text got {answer.text[:200]}")
        watched.stop()
    report.check(n_read == 0, f"{n_read} texts of clients that had left were read")
