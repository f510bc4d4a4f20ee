"""The names and arguments of function calls, read from JSON, tags or Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')


@dataclass(slots=True)
class Scanner:
    """A search for the end of JSON or Python in brackets, of which the text comes in pieces."""

    is_python: bool = False
    depth: int = 0
    _quote: str = ""
    _is_escaped: bool = False

    def scan(self, text: str) -> int | None:
        """Return where it ends in the next piece, or stops being JSON; None if nowhere."""
        for at, char in enumerate(text):
            if self._quote:
                if char == self._quote and not self._is_escaped:
                    self._quote = ""
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == "<" and not self.is_python:  # a tag, where the closing braces are missing
                return at
            elif char == '"' or (char == "'" and self.is_python):
                self._quote = char
            elif char in "{[" or (char == "(" and self.is_python):
                self.depth += 1
            elif char in "}]" or (char == ")" and self.is_python):
                self.depth -= 1
                if not self.depth:
                    return at + 1
        return None


def json_call(text: str, *, is_tagged: bool) -> tuple[str, str] | None:
    """Return the name and arguments of a call; only a tagged one may lack arguments."""
    try:
        call: dict[str, Any] = from_json(text, allow_inf_nan=False)
        values = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(call.get("name"), str) or not (values or is_tagged):
            return None
        arguments: Any = next((value for value in values if value is not None), {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call["name"], arguments
    except ValueError:
        return None


def value_of(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return the value of an argument that was written without quotation marks."""
    properties = schema.get("properties")
    kind = properties.get(key) if isinstance(properties, dict) else None
    kinds = kind.get("type") if isinstance(kind, dict) else "string"
    if kinds == "string":
        return text
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    may_be_text = isinstance(kinds, list) and "string" in kinds
    return text if may_be_text and value is not None else value


def bare_call(text: str, head: re.Pattern[str], quote: str) -> tuple[str, str] | None:
    """Return the name and arguments of a call with bare keys and other quotes; None if no call."""
    text = text.strip()
    if (match := head.match(text)) is None:
        return None
    parts = text[match.end() :].split(quote)
    for i, part in enumerate(parts):
        between_quotes = json.dumps(part, ensure_ascii=False)
        parts[i] = between_quotes if i % 2 else _BARE_KEY.sub(r'\1"\2":', part)
    arguments = "".join(parts)
    try:
        is_object = isinstance(from_json(arguments, allow_inf_nan=False), dict)
    except ValueError:
        return None
    return (match[1], arguments) if is_object else None


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of a list of calls with literals by name; [] if it is none."""
    try:
        tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("it is no call with arguments by name")
    values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
