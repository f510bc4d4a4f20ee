"""Grammars in Lark's notation for texts with function calls that must come, or must be valid."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from server.engine.grammar.constraints import JSON_OPTIONS, enforceable_schema
from server.text.tool_calls import ToolCallFormat

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # the schema of the arguments of each function, by its name

_dumps = partial(json.dumps, ensure_ascii=False)
_LINE = r'"\n"'
# In Llama's format a text that begins with a brace is a call. Python's whitespace, which the parser
# strips, is more than \s is here.
_NO_OBJECT = r"/[\s\x1c-\x1f]*[^{\s\x1c-\x1f](.|\n)*/"


def calls_only(
    form: ToolCallFormat,
    functions: Functions,
    tokens: Container[str],
    *,
    most: int | None,
    otherwise: Schema | None = None,
) -> str:
    """Return the grammar of calls of functions, or of JSON that the schema `otherwise` allows.

    tokens: added tokens, to which a grammar refers by name. most: 1 call, or None for any number.
    """
    call, separator = "body", _dumps("; ")
    if form is ToolCallFormat.HERMES:
        call = f"{_tag(form.opening, tokens)} {_LINE} body {_LINE} {_tag(form.closing, tokens)}"
        separator = _LINE
    start = "call" if most == 1 else f"call ({separator} call)*"
    lines = [f"call: {call}", *_bodies(form, functions)]
    if otherwise is not None:
        start += " | answer"
        lines.append(f"answer: {_json(otherwise)}")
    return "\n".join([f"start: {start}", *lines])


def calls_in_text(form: ToolCallFormat, functions: Functions, tokens: Container[str]) -> str:
    """Return the grammar of any text in which all that `ToolCallParser` reads as calls is valid."""
    opening, closing = form.opening, _tag(form.closing, tokens)
    if form is ToolCallFormat.LLAMA:
        start = f"(lead | {_tag(opening, tokens)})? body ({_dumps('; ')} body)* | TEXT?"
        text = _NO_OBJECT
    else:
        start = f"(lead SPACE? body SPACE? {closing})* TEXT"
        text = r"/(.|\n)*/"
    lead = "lead" if opening in tokens else "lead[lazy]"
    lines = [
        f"start: {start}",
        f"{lead}: TEXT {_tag(opening, tokens)}",
        # Even where the tag is a token, its characters are read as the tag.
        rf"TEXT: {text} & ~/(.|\n)*{re.escape(opening)}(.|\n)*/",
        r"SPACE: /[ \n]/",
        *_bodies(form, functions),
    ]
    return "\n".join(lines)


def _tag(tag: str, tokens: Container[str]) -> str:
    return tag if tag in tokens else _dumps(tag)


def _bodies(form: ToolCallFormat, functions: Functions) -> list[str]:
    """Return the rules of calls, split into the same pieces as JSON.

    The longest piece wins in the lexer: `{"name": ` would not let an answer be `{"city": `.
    """
    key = "arguments" if form is ToolCallFormat.HERMES else "parameters"
    lines = ["body: " + " | ".join(f"body_{i}" for i in range(len(functions)))]
    for i, (name, schema) in enumerate(functions.items()):
        begin = ("{", '"name"', ": ", _dumps(name), ", ", f'"{key}"', ": ")
        lines.append(f'body_{i}: {" ".join(map(_dumps, begin))} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: {_json(schema)}")
    return lines


def _json(schema: Schema) -> str:
    return "%json " + _dumps({**enforceable_schema(schema), "x-guidance": JSON_OPTIONS})
