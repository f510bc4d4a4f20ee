"""The memory that answers take until they are sent: forecast at admission, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from server.engine.machine import return_freed_memory
from server.errors import InvalidRequestError, OverloadedError
from server.requests.text_worker import TextWorker

# An answer is written while it is sent, and until then takes a fifth of its size, or less.
_MOST_AT_ONCE = 4  # answers of the largest size
_WHOLE = 4  # times what a batch's line may take: it is written down whole
_LARGE = 2**20  # bytes, after which glibc would keep much of the memory that they took


class AnswerMemory:
    """A bound on the forecast sizes of the answers that are made and sent at a time.

    most: bytes of one answer.
    """

    def __init__(self, most: int, text_worker: TextWorker) -> None:
        self._most, self._text_worker = most, text_worker
        self._n_held = 0

    def most(self, *, is_background: bool) -> int:
        """Return the largest size of an answer."""
        return self._most // _WHOLE if is_background else self._most

    def check(
        self, n_bytes: int, advice: str, param: str | None = None, *, is_background: bool = False
    ) -> None:
        """Raise InvalidRequestError for too large an answer; `advice` is what to do about it."""
        if n_bytes > (most := self.most(is_background=is_background)):
            which = "a batch's line" if is_background else "the setting max_answer_bytes"
            raise InvalidRequestError(
                f"the answer may have {n_bytes} bytes, more than the {most} of {which}; {advice}",
                param=param,
            )

    @contextmanager
    def hold(self, n_bytes: int, *, is_background: bool) -> Iterator[None]:
        """Count an answer until the block is left. Raises OverloadedError if there is no room."""
        n_bytes *= _WHOLE if is_background else 1
        most = _MOST_AT_ONCE * self._most
        if self._n_held and n_bytes and self._n_held + n_bytes > most:
            raise OverloadedError(
                f"answers of {self._n_held} bytes are being made or sent; with the {n_bytes} of "
                f"this one they would exceed {most}; try again",
                retry_after=1,
                limit="answers",
            )
        self._n_held += n_bytes
        try:
            yield
        finally:
            self._n_held -= n_bytes
            if n_bytes > _LARGE:  # once the callers have let go of it
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.run_in_executor, self._text_worker, return_freed_memory)
