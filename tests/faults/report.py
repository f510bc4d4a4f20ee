"""The result of a fault, and errors logged meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Report:
    """The number of times that a fault was tried, and a line for each loss.

    gaps: in seconds, between the tokens of a stream beside it. grown: bytes by which the server's
    memory grew at most. Both are missing where no server lives through the fault.
    """

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""
    gaps: list[float] = field(default_factory=list)
    grown: int | None = None

    @property
    def survived(self) -> int:
        return max(0, self.tried - len(self.lost))

    @property
    def figures(self) -> str:
        """The stalls in ms, p99 and the longest, and the growth in MiB."""
        stalls = (
            [f"{1000 * q:.1f}" for q in np.quantile(self.gaps, (0.99, 1))] if self.gaps else "--"
        )
        grown = "-" if self.grown is None else f"{self.grown / 2**20:.0f}"
        return f"{stalls[0]:>8} {stalls[1]:>8} {grown:>6}"

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
