"""What of a JSON schema holds a text, and what is only said about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Those that llguidance can hold a string to; it refuses others, which schemas made from types are full of.
FORMATS = (
    "date",
    "date-time",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
)

_BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
)  # keywords whose values name schemas
_VALUES = ("const", "enum")


def held_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the formats that say what a string is for: JSON Schema has them annotate, not hold."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    left: list[Any] = [copy]
    while left:  # no recursion: schemas may be as deep as JSON may
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
                del part["format"]
            for key, value in part.items():
                if key in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif key not in _VALUES:
                    left.append(value)
    return copy
