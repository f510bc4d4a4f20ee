"""What somebody who is mistaken can do: the name that was meant, the package that is missing."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

_LONGEST = 64  # characters of a name that is compared, which takes time by their number


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like this one, if any is."""
    return next(iter(get_close_matches(name[:_LONGEST], known, n=1)), None)


def did_you_mean(name: str, known: Collection[str], otherwise: str) -> str:
    """Return advice on an unknown name: the nearest known one, or else other words."""
    near = nearest(name, known)
    return otherwise if near is None else f"did you mean {near!r}?"


def install_command(*extras: str) -> str:
    """Return the command that installs extras of this package, in a checkout or without one."""
    wanted = ",".join(extras)
    if (Path(__file__).parents[2] / "constraints.txt").exists():
        return f"pip install -c constraints.txt -e '.[{wanted}]'"
    return f"pip install 'kvasir-lm[{wanted}]'"
