"""The name that somebody meant, among those that are known."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_LONGEST = 64  # characters of a name that is compared, which takes time by their number


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like this one, if any is."""
    return next(iter(get_close_matches(name[:_LONGEST], known, n=1)), None)


def did_you_mean(name: str, known: Collection[str], otherwise: str) -> str:
    """Return advice on an unknown name: the nearest known one, or else other words."""
    near = nearest(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"
