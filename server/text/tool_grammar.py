"""Grammars, in Lark's notation, of texts that call functions: for calls that must be, or must be valid."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from server.engine.grammar.constraints import JSON_OPTIONS
from server.engine.grammar.json_schemas import enforceable_schema
from server.text.tool_calls import ToolCallFormat

_LINE = r'"\n"'
_SPACE = r"SPACE: /[ \n]/"
# In Llama's format a text that begins with a brace is a call. What Python takes for whitespace is more than \s is here.
_NO_OBJECT = r"/[\s\x1c-\x1f]*[^{\s\x1c-\x1f](.|\n)*/"


def calls_only(
    form: ToolCallFormat,
    functions: Mapping[str, Mapping[str, Any]],
    tokens: Container[str],
    *,
    most: int | None,
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Calls of functions, given by name with the schemas of their arguments; or JSON of the schema `otherwise`.

    tokens: tags that are added tokens, of which a grammar speaks by name. most: calls; None is any number.
    """
    call, separator = "body", _literal("; ")
    if form is ToolCallFormat.HERMES:
        call = f"{_tag(form.opening, tokens)} {_LINE} body {_LINE} {_tag(form.closing, tokens)}"
        separator = _LINE
    calls = "call" if most == 1 else f"call ({separator} call)*"
    lines = [
        f"start: {calls}" + ("" if otherwise is None else " | answer"),
        f"call: {call}",
        *_bodies(form, functions),
    ]
    if otherwise is not None:
        lines.append(f"answer: {_json(otherwise)}")
    return "\n".join(lines)


def calls_in_text(
    form: ToolCallFormat, functions: Mapping[str, Mapping[str, Any]], tokens: Container[str]
) -> str:
    """Any text, in which all that `ToolCallParser` reads as calls is valid calls."""
    opening, closing = form.opening, _tag(form.closing, tokens)
    if form is ToolCallFormat.LLAMA:
        start = f"(lead | {_tag(opening, tokens)})? body ({_literal('; ')} body)* | TEXT?"
        text = _NO_OBJECT
    else:
        start = f"(lead SPACE? body SPACE? {closing})* TEXT"
        text = r"/(.|\n)*/"
    # Also where the tag is a token, its characters are read as the tag.
    lead = (
        f"lead: TEXT {_tag(opening, tokens)}"
        if opening in tokens
        else f"lead[lazy]: TEXT {_literal(opening)}"
    )
    text = rf"TEXT: {text} & ~/(.|\n)*{re.escape(opening)}(.|\n)*/"
    return "\n".join([f"start: {start}", lead, text, _SPACE, *_bodies(form, functions)])


def _tag(tag: str, tokens: Container[str]) -> str:
    return tag if tag in tokens else _literal(tag)


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
    return "%json " + json.dumps(
        {**enforceable_schema(schema), "x-guidance": JSON_OPTIONS}, ensure_ascii=False
    )
