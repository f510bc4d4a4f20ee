"""Grammars, in Lark's notation, of texts that call functions: for calls that must be, or must be valid."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from server.engine.constraints import JSON_OPTIONS
from server.tool_calls import ToolCallFormat

_LINE = r'"\n"'
_TEXT = r"TEXT: /(.|\n)*/"
_NO_OBJECT = r"TEXT: /\s*[^{\s](.|\n)*/"  # in Llama's format a text that begins with a brace is a call


def calls_only(
    form: ToolCallFormat,
    functions: Mapping[str, Mapping[str, Any]],
    special: Container[str],
    *,
    most: int | None,
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Calls of functions, given by name with the schemas of their arguments; or JSON of the schema `otherwise`.

    special: tags that are tokens. most: calls; None is any number.
    """
    opening, closing, separator = _marks(form, special)
    calls = "call" if most == 1 else f"call ({separator} call)*"
    lines = [
        f"start: {calls}" + ("" if otherwise is None else " | answer"),
        f"call: {opening} body {closing}",
        *_bodies(form, functions),
    ]
    if otherwise is not None:
        lines.append(f"answer: {_json(otherwise)}")
    return "\n".join(lines)


def calls_in_text(form: ToolCallFormat, functions: Mapping[str, Mapping[str, Any]], special: Container[str]) -> str:
    """Any text, in which what looks like calls are valid calls."""
    opening, closing, separator = _marks(form, special)
    if form is ToolCallFormat.LLAMA:
        tag = f"{form.opening}? " if form.opening in special else ""
        head = [f"start: {tag}body ({separator} body)* | TEXT?", _NO_OBJECT]
    elif form.opening in special:
        head = [f"start: (lead body {closing})* TEXT", f"lead: TEXT {opening}", _TEXT]
    else:
        head = [f"start: (lead body {closing})* TEXT", f"lead[lazy]: TEXT {opening}", _TEXT]
    return "\n".join([*head, *_bodies(form, functions)])


def _marks(form: ToolCallFormat, special: Container[str]) -> tuple[str, str, str]:
    """What stands before a call, behind it, and between two."""
    if form is ToolCallFormat.LLAMA:
        return "", "", _literal("; ")
    opening = f"{form.opening} {_LINE}" if form.opening in special else _literal(f"{form.opening}\n")
    closing = f"{_LINE} {form.closing}" if form.closing in special else _literal(f"\n{form.closing}")
    return opening, closing, _LINE


def _bodies(form: ToolCallFormat, functions: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Cut up as JSON is, for the longest piece wins: `{"name": ` would not let an answer be `{"city": `."""
    key = "arguments" if form is ToolCallFormat.HERMES else "parameters"
    lines = ["body: " + " | ".join(f"body_{i}" for i in range(len(functions)))]
    for i, (name, schema) in enumerate(functions.items()):
        begin = ("{", '"name"', ": ", json.dumps(name, ensure_ascii=False), ", ", f'"{key}"', ": ")
        lines += [
            f'body_{i}: {" ".join(map(_literal, begin))} arguments_{i} "}}"',
            f"arguments_{i}: {_json(schema)}",
        ]
    return lines


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
