"""Grammars of texts with calls: all calls that the parser reads in such a text are valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvasir.server.engine.grammar.compiler import GrammarCompiler
from kvasir.server.engine.grammar.constraints import Constraint, Grammar
from kvasir.server.text.tool_calls import ToolCallParser, ToolCallPiece
from kvasir.server.text.tool_formats import DEEPSEEK_TAGS, ToolCallFormat
from kvasir.server.text.tool_grammar import calls_in_text
from tests.kit.serving import EOS, small_tokenizer

HERMES, LLAMA = ToolCallFormat.HERMES, ToolCallFormat.LLAMA
FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "additionalProperties": {"type": "string"}},
}
FORMS = [form for form in ToolCallFormat if form.forced is form]
KINDS = ("text", "special", "added")  # the kinds of tokens that the tags can be


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    if kind != "text":
        tags = sorted(tag for form in FORMS for tag in form.tags)
        tokenizer.add_tokens(
            [AddedToken(tag, special=kind == "special", normalized=False) for tag in tags]
        )
    return tokenizer


def ids_of_tags(form: ToolCallFormat, kind: str) -> dict[str, int]:
    ids: dict[str, int] = tokenizer_of(kind).get_vocab()
    return {tag: ids[tag] for tag in form.tags if kind != "text"}


@cache
def begun(form: ToolCallFormat, kind: str) -> Constraint:
    tokenizer = tokenizer_of(kind)
    tokens = ids_of_tags(form, kind)
    compiler = GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [EOS])
    return compiler.compile(Grammar("lark", calls_in_text(form, FUNCTIONS, tokens), "tools"))


def ids_of(kind: str, pieces: Sequence[str], *, spelled: bool) -> list[int]:
    """Tokenize a text; `spelled`: with tags in tokens of text."""
    tokenizer = small_tokenizer() if spelled else tokenizer_of(kind)
    return [i for piece in pieces for i in tokenizer.encode(piece).ids]


def accepted(form: ToolCallFormat, kind: str, ids: list[int]) -> tuple[int, bool]:
    """How many tokens the grammar accepts, and whether the text may end after all of them."""
    n = begun(form, kind).copy().matcher.validate_tokens([*ids, EOS])
    return min(n, len(ids)), n > len(ids)


def check(form: ToolCallFormat, text: str) -> int:
    """Count the calls; each names a function, and has valid arguments where these have ended."""
    parser = ToolCallParser(form)
    pieces = [
        piece for piece in (*parser.push(text), *parser.flush()) if isinstance(piece, ToolCallPiece)
    ]
    names = [piece.name for piece in pieces if piece.name is not None]
    assert set(names) <= FUNCTIONS.keys(), text
    for i, name in enumerate(names[: len(names) - parser.is_in_call]):
        arguments = json.loads("".join(piece.arguments for piece in pieces if piece.index == i))
        jsonschema.validate(arguments, FUNCTIONS[name])
    return len(names)


TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", *DEEPSEEK_TAGS)
CALLS = tuple(
    f'{{"name": "{name}", "{key}": {arguments}}}'
    for name, arguments in [
        *(("f", '{"a": 1}'), ("f", '{"a": 2}')),
        *(("g", '{"a": "<tool_call>"}'), ("g", "{}"), ("h", "{}")),
    ]
    for key in ("arguments", "parameters")
)
FRAGMENTS = (
    *TAGS, *CALLS, "f", "[ARGS]", "g", '{"a": 2}', "function", "\n```json\n", '{"name":"f",', "{",
    "}", "; ", "\n", " ", "\x1c", "So", "<", "é",
)  # fmt: skip


@given(
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(KINDS),
    spelled=st.booleans(),
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
)
@example(HERMES, "text", False, ["<tool_call>", CALLS[2], "</tool_call>"])
@example(HERMES, "added", True, ["So", "<tool_call>", CALLS[2], "</tool_call>"])
@example(HERMES, "text", False, ["<tool_call>", " ", "\n", CALLS[-1]])
@example(LLAMA, "text", False, ["<|python_tag|>", CALLS[3]])
@example(LLAMA, "text", False, ["So", " ", "<|python_tag|>", CALLS[-1]])
@example(LLAMA, "special", True, ["So", "<|python_tag|>", CALLS[-1]])
@example(LLAMA, "special", False, ["\x1c", CALLS[-1]])
def test_calls_in_an_accepted_text_are_valid(
    form: ToolCallFormat, kind: str, spelled: bool, pieces: list[str]
) -> None:
    ids = ids_of(kind, pieces, spelled=spelled)
    n, _ = accepted(form, kind, ids)
    check(form, tokenizer_of(kind).decode(ids[:n], skip_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "text", "n_calls"),
    [
        (HERMES, "Just <b>text</b> {}", 0),
        (HERMES, 'Two:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
                 '<tool_call>{"name": "g", "arguments": {"b": "}"}}</tool_call> Done.', 2),
        (LLAMA, "Just {text}", 0),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', 2),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', 1),
        (LLAMA, 'So: <|python_tag|>{"name": "f", "parameters": {"a": 1}}', 1),
    ],
)  # fmt: skip
def test_valid_calls_and_texts_are_accepted(
    form: ToolCallFormat, kind: str, text: str, n_calls: int
) -> None:
    ids = ids_of(kind, [text], spelled=False)
    assert accepted(form, kind, ids) == (len(ids), True)
    assert check(form, text) == n_calls
