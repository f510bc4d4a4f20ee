"""Threads with bounded queues, and those that parse, render, tokenise and decode long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvasir.model.platform.machine import return_freed_memory
from kvasir.model.tokenizer import panics_as_errors
from kvasir.server.errors import KvasirError, OverloadedError, OverloadLimit

T = TypeVar("T")

SHORT = 4096  # characters or tokens that are handled on the event loop
MOST_WAITING = 2**23  # characters: two bodies of the largest size, a few seconds of work
_LARGE = 2**16  # characters, after which glibc would keep much of the memory that they took
THREADS = 2  # so that a long text does not stop a shorter one


class BoundedThreads(ThreadPoolExecutor):
    """Threads with a queue that is bounded by the size of the work in it.

    full: the error for more than `most`, with {inside} and {size}. limit: its name for metrics.
    """

    def __init__(
        self, n_threads: int, name: str, most: int, full: str, limit: OverloadLimit | None = None
    ) -> None:
        super().__init__(n_threads, name)
        self._most, self._full, self._limit = most, full, limit
        self._n_inside = 0

    async def run(self, work: Callable[[], T], size: int = 1) -> T:
        """Return the result of work; it is left out if its caller is cancelled before its turn.

        Raises OverloadedError if too much waits; work that is alone may have any size.
        """
        if self._n_inside > max(0, self._most - size):
            message = self._full.format(inside=self._n_inside, size=size)
            raise OverloadedError(f"{message}; try again", retry_after=1, limit=self._limit)
        self._n_inside += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self, work)
        finally:
            self._n_inside -= size


class TextWorker(BoundedThreads):
    """Threads for work on texts, whose size is their characters or tokens."""

    def __init__(self) -> None:
        full = (
            "texts of {inside} characters are waiting to be read; with the {size} of this one they "
            f"would exceed {MOST_WAITING}"
        )
        super().__init__(THREADS, "texts", MOST_WAITING, full, "texts")
        self._short = BoundedThreads(THREADS, "short-texts", MOST_WAITING, full, "texts")

    async def call(self, size: int, work: Callable[[], T], *, waits: bool = False) -> T:
        """Return the result of work on a text of a size, in a thread if it is long; see `run`.

        waits: it waits for another process, so it is never done on the event loop.
        """

        def run() -> T:
            try:
                with panics_as_errors():
                    return work()
            except KvasirError as error:
                # A traceback keeps what the work has made, which the event loop would have to free.
                raise error.with_traceback(None) from None
            finally:
                if size > _LARGE:
                    return_freed_memory()

        if size > SHORT:
            return await self.run(run, size)
        if waits:
            return await self._short.run(run, size)
        with panics_as_errors():
            return work()
