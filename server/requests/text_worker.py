"""Work on long texts, off the event loop: parse, render, tokenise, decode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvasir.model.tokenizer import panics_as_errors
from kvasir.server.engine.machine import return_freed_memory
from kvasir.server.errors import KvasirError, OverloadedError

T = TypeVar("T")

SHORT = 4096  # characters or tokens that are handled on the event loop
MOST_WAITING = 2**23  # characters: two bodies of the largest size, a few seconds of work
_LARGE = 2**16  # characters, after which glibc would keep much of the memory that they took
THREADS = 2  # so that a long text does not stop a shorter one


class TextWorker(ThreadPoolExecutor):
    """Threads with a queue that is bounded by the size of the texts in it."""

    def __init__(self) -> None:
        super().__init__(THREADS, "texts")
        self._short = ThreadPoolExecutor(THREADS, "short-texts")
        self._n_inside = 0

    async def call(self, size: int, work: Callable[[], T], *, waits: bool = False) -> T:
        """Return the result of work on `size` characters or tokens, in a thread if they are many.

        waits: it waits for another process, so it is never done on the event loop. Work whose
        caller is cancelled before its turn is left out. Raises OverloadedError if too many
        characters wait; a text that is alone may have any number.
        """
        if size <= SHORT and not waits:
            with panics_as_errors():
                return work()
        if size > SHORT and self._n_inside > max(0, MOST_WAITING - size):
            raise OverloadedError(
                f"texts of {self._n_inside} characters are waiting to be read; with the {size} of "
                f"this one they would exceed {MOST_WAITING}; try again",
                retry_after=1,
                limit="texts",
            )

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

        self._n_inside += size
        try:
            executor = self if size > SHORT else self._short
            return await asyncio.get_running_loop().run_in_executor(executor, run)
        finally:
            self._n_inside -= size
