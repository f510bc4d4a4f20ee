"""The result of a fault or an attack, and errors logged meanwhile."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_UNAVAILABLE = (503, 504, 507)


@dataclass(slots=True)
class Report:
    """The number of times that a fault was tried, and a line for each loss.

    statuses: of an attack's answers; 0 is a connection that was closed without one.
    """

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def survived(self) -> int:
        return max(0, self.tried - len(self.lost))

    def check(self, good: bool, otherwise: str) -> None:
        if not good:
            self.lost.append(otherwise)

    def answered(self, status: int, shown: str, *expected: int) -> None:
        """Count an answer, which must be one of those expected, or proper in any way."""
        self.tried += 1
        self.statuses[status] += 1
        good = status in expected if expected else 200 <= status < 500 or status in _UNAVAILABLE
        self.check(good, f"{shown}: {status}")


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
