"""The memory of answers that are made and sent: forecast at admission, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvasir.model.platform.machine import return_freed_memory
from kvasir.server.errors import InvalidRequestError, OverloadedError
from kvasir.server.requests.text_worker import TextWorker

MAX_BYTES = 2**26  # of an answer, beside its new text
# Of the largest size. One is written while it is sent, and takes a fifth of that until then.
_MOST_AT_ONCE = 4
_BATCH_SHARE = 4  # a line of a batch is held whole, and may have a fourth
_LARGE = 2**20  # bytes, after which glibc would keep much of the memory that they took


@dataclass
class AnswerMemory:
    """A bound on the bytes of an answer, and on those of all that are made and sent at a time."""

    most: int
    text_worker: TextWorker
    n_held: int = 0

    @classmethod
    def pots(cls, text_worker: TextWorker) -> dict[bool, AnswerMemory]:
        """Return that of clients, and at True that of lines of batches."""
        return {
            False: cls(MAX_BYTES, text_worker),
            True: cls(MAX_BYTES // _BATCH_SHARE, text_worker),
        }

    def check(self, n_bytes: int, advice: str, param: str | None = None) -> None:
        """Raise InvalidRequestError for too large an answer; `advice` is what to do about it."""
        if n_bytes > self.most:
            raise InvalidRequestError(
                f"the answer may have {n_bytes} bytes, more than {self.most}; {advice}", param=param
            )

    @contextmanager
    def hold(self, n_bytes: int) -> Iterator[None]:
        """Count an answer until the block is left. Raises OverloadedError if there is no room."""
        most = _MOST_AT_ONCE * self.most
        if n_bytes and self.n_held and self.n_held + n_bytes > most:
            raise OverloadedError(
                f"answers of {self.n_held} bytes are being made or sent; with the {n_bytes} of "
                f"this one they would exceed {most}; try again",
                retry_after=1,
                limit="answers",
            )
        self.n_held += n_bytes
        try:
            yield
        finally:
            self.n_held -= n_bytes
            if n_bytes > _LARGE:  # once the callers have let go of it
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.run_in_executor, self.text_worker, return_freed_memory)
