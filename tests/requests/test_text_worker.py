"""Long texts wait in a queue of bounded size, and those of clients that have left are skipped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from kvasir.server.errors import OverloadedError
from kvasir.server.requests.text_worker import MOST_WAITING, SHORT, THREADS, TextWorker
from tests.kit.fake_runner import TIMEOUT

LONG = 2**20


@contextmanager
def busy_worker() -> Iterator[tuple[TextWorker, threading.Event]]:
    worker, go = TextWorker(), threading.Event()
    try:
        for _ in range(THREADS):
            worker.submit(go.wait, TIMEOUT)
        yield worker, go
    finally:
        go.set()
        worker.shutdown()


async def test_too_many_characters_are_refused_and_later_taken() -> None:
    """A text that is alone may have any number."""
    with busy_worker() as (worker, go):
        waiting = [
            asyncio.ensure_future(worker.call(LONG, partial(int, i)))
            for i in range(MOST_WAITING // LONG)
        ]
        await asyncio.sleep(0)
        with pytest.raises(
            OverloadedError, match=f"{MOST_WAITING} characters are waiting"
        ) as caught:
            await worker.call(LONG, list)
        assert (caught.value.reason, caught.value.retry_after) == ("overloaded_texts", 1)
        assert await worker.call(10, lambda: "short") == "short"
        go.set()
        assert await asyncio.gather(*waiting) == list(range(len(waiting)))
        assert await worker.call(2 * MOST_WAITING, lambda: "alone") == "alone"


async def test_work_of_a_cancelled_caller_is_skipped_and_its_place_is_free() -> None:
    with busy_worker() as (worker, go):
        done: list[int] = []
        left = asyncio.ensure_future(worker.call(MOST_WAITING, lambda: done.append(1)))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        other = asyncio.ensure_future(worker.call(MOST_WAITING, lambda: done.append(2)))
        await asyncio.sleep(0)
        go.set()
        await other
        assert done == [2]


async def test_work_that_waits_for_a_process_is_bounded_and_holds_up_no_other() -> None:
    """Neither the event loop nor long texts."""
    worker, go = TextWorker(), threading.Event()
    waiting = [
        asyncio.ensure_future(worker.call(SHORT, partial(go.wait, TIMEOUT), waits=True))
        for _ in range(MOST_WAITING // SHORT)
    ]
    await asyncio.sleep(0)
    assert [await worker.call(n, lambda: "read") for n in (1, LONG)] == ["read", "read"]
    with pytest.raises(OverloadedError, match=f"{MOST_WAITING} characters are waiting"):
        await worker.call(1, lambda: "read", waits=True)
    go.set()
    assert all(await asyncio.gather(*waiting))
    worker.shutdown()
