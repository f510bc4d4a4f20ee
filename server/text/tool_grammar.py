"""Grammars in Lark's notation: of calls that must come or be valid, and reasoning before them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvasir.server.engine.grammar.constraints import JSON_OPTIONS, enforceable_schema
from kvasir.server.text.reasoning import ReasoningFormat
from kvasir.server.text.tool_formats import DEEPSEEK_TAGS, KIMI_TAGS, ToolCallFormat

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # the schema of the arguments of each function, by its name
Tokens = Mapping[str, int]  # the ids of tags that are added tokens: a grammar refers to those by id

_dumps = partial(json.dumps, ensure_ascii=False)
# In Llama's format a text that begins with a brace is a call. Python's whitespace, which the parser
# strips, is more than \s is here.
_NO_OBJECT = r"/[\s\x1c-\x1f]*[^{\s\x1c-\x1f](.|\n)*/"
_NAME, _ARGUMENTS = "NAME", "ARGUMENTS"  # places in a call
_BEGIN, _CALL, _SEP, _CALL_END, _END = DEEPSEEK_TAGS


def _body(key: str) -> tuple[str, ...]:
    """Return a call in JSON, split into the same pieces as JSON.

    The longest piece wins in the lexer: `{"name": ` would not let an answer be `{"city": `.
    """
    return ("{", '"name"', ": ", f'"{_NAME}"', ", ", f'"{key}"', ": ", _ARGUMENTS, "}")


@dataclass(frozen=True, slots=True)
class _Calls:
    """The parts of texts with calls: of a call, and before, between and after several."""

    call: tuple[str, ...]
    between: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


_LIST = _Calls(_body("arguments"), (", ",), ("[",), ("]",))
_CALLS = {
    ToolCallFormat.HERMES: _Calls(
        ("<tool_call>", "\n", *_body("arguments"), "\n", "</tool_call>"), ("\n",)
    ),
    ToolCallFormat.LLAMA: _Calls(_body("parameters"), ("; ",)),
    ToolCallFormat.MISTRAL: replace(_LIST, before=("[TOOL_CALLS]", "[")),
    ToolCallFormat.MISTRAL_ARGS: _Calls(("[TOOL_CALLS]", _NAME, "[ARGS]", _ARGUMENTS)),
    ToolCallFormat.GRANITE: replace(_LIST, before=("<|tool_call|>", "[")),
    ToolCallFormat.NEMOTRON: replace(_LIST, before=("<TOOLCALL>", "["), after=("]", "</TOOLCALL>")),
    ToolCallFormat.HUNYUAN: replace(
        _LIST, before=("<tool_calls>", "["), after=("]", "</tool_calls>")
    ),
    ToolCallFormat.DEEPSEEK: _Calls(
        (_CALL, "function", _SEP, _NAME, "\n```json\n", _ARGUMENTS, "\n```", _CALL_END),
        ("\n",),
        (_BEGIN,),
        (_END,),
    ),
    # A call's number counts on in what a model writes; a grammar cannot count.
    ToolCallFormat.KIMI: _Calls(
        (KIMI_TAGS[1], "functions.", _NAME, ":0", KIMI_TAGS[2], _ARGUMENTS, KIMI_TAGS[3]),
        (),
        (KIMI_TAGS[0],),
        (KIMI_TAGS[4],),
    ),
    ToolCallFormat.DEEPSEEK_V31: _Calls(
        (_CALL, _NAME, _SEP, _ARGUMENTS, _CALL_END), (), (_BEGIN,), (_END,)
    ),
}


def calls_only(
    form: ToolCallFormat,
    functions: Functions,
    tokens: Tokens,
    *,
    most: int | None,
    otherwise: Schema | None = None,
) -> str:
    """Return the grammar of calls of functions, or of JSON that the schema `otherwise` allows.

    most: 1 call, or None for any number.
    """
    parts = _CALLS[form]
    more = "" if most == 1 else f"({_join(parts.between, tokens)} call)*"
    start = f"{_join(parts.before, tokens)} call {more} {_join(parts.after, tokens)}"
    lines = _call_rules(parts.call, functions, tokens)
    if otherwise is not None:
        start += " | answer"
        lines.append(f"answer: {_json(otherwise)}")
    return "\n".join([f"start: {start}", *lines])


def calls_in_text(form: ToolCallFormat, functions: Functions, tokens: Tokens) -> str:
    """Return the grammar of any text in which all that `ToolCallParser` reads as calls is valid."""
    parts, opening = _CALLS[form], form.opening
    text = r"/(.|\n)*/"
    if form is ToolCallFormat.LLAMA:
        call, text = parts.call, _NO_OBJECT
        calls = f"call ({_join(parts.between, tokens)} call)*"
        start = f"(lead | {_tag(opening, tokens)})? {calls} | TEXT?"
    elif parts.before:
        call = parts.call
        more = f"({_join(parts.between, tokens, is_free=True)} call)*"
        before, after = (_join(around, tokens) for around in (parts.before[1:], parts.after))
        start = f"(lead {before} call {more} {after})* TEXT"
    else:  # each call begins with the opening
        call, start = parts.call[1:], "(lead call)* TEXT"
    lines = [
        f"start: {start}",
        *until(opening, tokens, text),
        *_call_rules(call, functions, tokens, is_free=True),
    ]
    return "\n".join(lines)


def until(tag: str, tokens: Tokens, text: str = r"/(.|\n)*/") -> list[str]:
    """Return the rules of TEXT without a tag, and of `lead`, such a text with the tag after it."""
    lead = "lead" if tag in tokens else "lead[lazy]"
    pattern = re.sub(r"[\[\]|/]", r"\\\g<0>", tag)
    return [
        f"{lead}: TEXT {_tag(tag, tokens)}",
        # Even where the tag is a token, its characters are read as the tag.
        rf"TEXT: {text} & ~/(.|\n)*{pattern}(.|\n)*/",
        r"SPACE: /[ \n]/",
    ]


def reasoning_before(form: ReasoningFormat, tokens: Tokens, *, is_open: bool) -> str:
    """Return the rules of `before` (`Grammar.lead`): reasoning, which has begun or may begin."""
    rest = "lead SPACE? SPACE?"
    before = rest if is_open else f"({_tag(form.opening, tokens)} {rest})?"
    return "\n".join([f"before: {before}", *until(form.closing, tokens)])


def _tag(tag: str, tokens: Tokens) -> str:
    return f"<[{tokens[tag]}]>" if tag in tokens else _dumps(tag)


def _join(parts: Iterable[str], tokens: Tokens, *, is_free: bool = False) -> str:
    """Return parts as Lark has them. is_free: a line feed may be missing, or be a space."""
    return " ".join("SPACE?" if part == "\n" and is_free else _tag(part, tokens) for part in parts)


def _call_rules(
    parts: Sequence[str], functions: Functions, tokens: Tokens, *, is_free: bool = False
) -> list[str]:
    """Return the rules of a call of any function."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    at = parts.index(_ARGUMENTS)
    for i, (name, schema) in enumerate(functions.items()):
        named = [
            _dumps(name) if part == f'"{_NAME}"' else name if part == _NAME else part
            for part in parts
        ]
        before, after = (
            _join(around, tokens, is_free=is_free) for around in (named[:at], named[at + 1 :])
        )
        lines += [f"call_{i}: {before} arguments_{i} {after}", f"arguments_{i}: {_json(schema)}"]
    return lines


def _json(schema: Schema) -> str:
    return "%json " + _dumps({**enforceable_schema(schema), "x-guidance": JSON_OPTIONS})
