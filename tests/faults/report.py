"""The result of a fault, and errors logged meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """The number of times that a fault was tried, and a line for each loss."""

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def survived(self) -> int:
        return max(0, self.tried - len(self.lost))

    def check(self, good: bool, otherwise: str) -> None:
        if not good:
            self.lost.append(otherwise)


class _Errors(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(
            f"the log says: {record.name}: {record.getMessage()} {record.exc_info or ''}"
        )


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    """Collect all errors that are logged, with stack traces."""
    messages: list[str] = []
    handler = _Errors(messages)
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)
