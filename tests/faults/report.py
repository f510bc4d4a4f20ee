"""The result of a fault or an attack."""

from __future__ import annotations

from collections import Counter
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
