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


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    """Collect all errors that are logged, with stack traces."""
    messages: list[str] = []

    def note(record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()} {record.exc_info or ''}"
        messages.append(f"the log says: {text}")

    handler = logging.Handler(logging.ERROR)
    handler.emit = note  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)
