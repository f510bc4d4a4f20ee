"""Values of settings: as people write them, and what is wrong with one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, ValidationError

_FAULTS = {  # by the type of pydantic's error; others keep pydantic's words
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "byte_size": "must be a size, such as 2GiB",
    "byte_size_unit": "must be a size, such as 2GiB",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "extra_forbidden": "is unknown; kvasir serve --help lists them",
}


def split(value: object) -> object:
    """Return the parts of a text between commas; another value as it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def listed(value: object) -> object:
    """Return a lone path, or the parts of a text, as a list."""
    return [value] if isinstance(value, Path) else split(value)


# As browsers send it: no path, no slash.
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,]+)$")]
Host = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*)$")]
Named = Annotated[str, Field(pattern=r"^[^=\s/]+=.+$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PARTS = re.compile(f"({_NUMBER})(ms|h|m|s)")  # of a duration
_DURATION = f"^-?({_NUMBER}|({_NUMBER}(ms|h|m|s))+)$"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_TEXT = 64  # characters: matching a long one takes time and memory for each
_FOREVER = 10**10  # seconds, three centuries


def seconds_of(value: object) -> float:
    """Return a duration of Ollama's in seconds: a number of them, or text as 1h30m or 500ms.

    Negative and very long ones are for ever. Raises ValueError.
    """
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value) if 0 <= value < _FOREVER else math.inf
    text = str(value)
    if len(text) > _LONGEST_TEXT or not re.fullmatch(_DURATION, text):
        raise ValueError("must be a duration in seconds or as 5m, 1h30m; -1 is for ever")
    parts = _PARTS.findall(text) or [(text, "s")]
    seconds = sum(float(n) * _UNITS[unit] for n, unit in parts)
    return seconds if text[0] != "-" and seconds < _FOREVER else math.inf


_Text = Annotated[str, Field(pattern=_DURATION)]
KeepAlive = Annotated[float, BeforeValidator(seconds_of, json_schema_input_type=_Text)]


def shown_default(default: object) -> str:
    """Return a default as a user writes it, such as 4MiB."""
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def describe_fault(error: ValidationError) -> str:
    """Return pydantic's first complaint in our words, such as `must be at most 8`."""
    first = error.errors()[0]
    if template := _FAULTS.get(first["type"]):
        return template.format(**first.get("ctx", {}))
    return re.sub("^(Input|String) should", "must", first["msg"].removeprefix("Value error, "))


def split_name(given: Path) -> tuple[str, Path]:
    """Return the name and the directory of NAME=DIR; no name for the path of something."""
    name, is_named, path = str(given).partition("=")
    return (name, Path(path)) if is_named and not given.exists() else ("", given)
