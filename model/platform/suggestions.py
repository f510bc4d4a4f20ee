"""What was wrong in one line, and the mend: the name that was meant, the missing package."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

_LONGEST_ERROR = 300  # characters: a value may be a list of millions
# Told first, since a misspelt field leaves another missing.
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_LONGEST_NAME = 64  # characters of a name that is compared, which takes time by their number


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the known name that is most like this one, if any is."""
    return next(iter(get_close_matches(name[:_LONGEST_NAME], names, n=1)), None)


def did_you_mean(name: str, names: Collection[str], otherwise: str) -> str:
    """Return advice on an unknown name: the nearest known one, or else other words."""
    near = nearest(name, names)
    return otherwise if near is None else f"did you mean {near!r}?"


def first_problem(error: ValueError, names: Collection[str] = ()) -> str:
    """Return an error as one line: pydantic's first field, what it may be, and its value.

    names: of fields, the nearest of which is suggested for an unknown one.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors()
    first = next((problem for problem in problems if problem["type"] in _UNKNOWN), problems[0])
    *outer, name = map(str, first["loc"] or [error.title])
    where, path = ".".join(outer) or error.title, ".".join([*outer, name])
    if first["type"] == "missing":
        return f"{where} lacks the field {name!r}"
    if first["type"] in _UNKNOWN:
        near = nearest(name, {*names} - {name})  # which may be a field of another object
        hint = "" if near is None else f"; did you mean {near!r}?"
        return f"unknown field {name!r} in {where}{hint}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])[:_LONGEST_ERROR]
    allowed = first["msg"].removeprefix("Input should be ")
    if allowed == first["msg"]:
        return f"{path}: {allowed}"
    return f"{path} must be {allowed}, not {first['input']!r:.{_LONGEST_ERROR}}"


def install_command(*extras: str) -> str:
    """Return the command that installs extras of this package, in a checkout or without one."""
    wanted = ",".join(extras)
    if (Path(__file__).parents[3] / "constraints.txt").exists():
        return f"pip install -c constraints.txt -e '.[{wanted}]'"
    return f"pip install 'kvasir-lm[{wanted}]'"
