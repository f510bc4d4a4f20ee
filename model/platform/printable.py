"""A text that others made, for a terminal or a log."""

from __future__ import annotations

import json
from typing import Any

_DELETE = 0x7F
_PICTURES = {code: chr(0x2400 + code) for code in range(32)} | {_DELETE: "\u2421"}
# Controls of C1, separators of lines, changes of direction, and surrogates, which nothing encodes.
_ESCAPED = (
    *range(_DELETE + 1, 0xA0),
    *(0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    *range(0xD800, 0xE000),
)
_IN_LINES = _PICTURES | {code: rf"\u{code:04x}" for code in _ESCAPED}
_IN_TEXT = {code: shown for code, shown in _IN_LINES.items() if chr(code) not in "\n\t"}


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text with what a terminal would obey as pictures or escapes.

    Line breaks and tabs stay, unless it is to be one line.
    """
    return text.translate(_IN_LINES if one_line else _IN_TEXT)


def error_message(body: Any) -> str:
    """Return the message of OpenAI's error object or its JSON, or the start of any other body."""
    if isinstance(body, str | bytes):
        try:
            return error_message(json.loads(body))
        except ValueError:
            return (body.decode(errors="replace") if isinstance(body, bytes) else body)[:200]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
