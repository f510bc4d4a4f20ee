"""Reports on long work: functions say how far they are, and a caller may show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Called with a description of the work, the units done, and their total (0: unknown).
Progress = Callable[[str, int, int], object]
T = TypeVar("T")


def unheard(what: str, done: int, total: int) -> None:
    """Ignore a report."""


def followed(items: Sequence[T], what: str, progress: Progress) -> Iterator[T]:
    """Yield the items, and report how many of them are done."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
