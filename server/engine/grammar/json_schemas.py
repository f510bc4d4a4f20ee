"""The keywords of a JSON schema that can be enforced on a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The formats that llguidance can enforce. It refuses others, which schemas made from types often
# have.
_NAMES = "date date-time time duration email hostname ipv4 ipv6 uri uuid"
FORMATS = tuple(_NAMES.split())

_VALUES_ARE_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_NO_SCHEMAS = ("const", "enum")


def enforceable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema without other formats: in JSON Schema these only annotate a string."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    pending: list[Any] = [copy]
    while pending:  # no recursion: schemas may be as deep as JSON may
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
                del part["format"]
            for key, value in part.items():
                if key in _VALUES_ARE_SCHEMAS and isinstance(value, dict):
                    pending += value.values()
                elif key not in _NO_SCHEMAS:
                    pending.append(value)
    return copy
