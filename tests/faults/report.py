"""What a fault did, and the log's errors meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """How often a fault was tried, and in words each time that something was lost by it."""

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
    """Everything that anybody logs as an error, stack traces among them."""
    messages: list[str] = []
    handler = _Errors(messages)
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)
