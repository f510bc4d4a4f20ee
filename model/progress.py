"""How long work is followed: rooms say how far they are, and whoever listens draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[
    [str, int, int], object
]  # what is being done; how much of it is done, of how much: 0, not known
T = TypeVar("T")


def unheard(what: str, done: int, total: int) -> None:
    """Nobody listens."""


def followed(items: Sequence[T], what: str, progress: Progress) -> Iterator[T]:
    """The items, while progress is told how many of them are done."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
