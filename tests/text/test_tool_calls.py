"""Calls in a model's text: nothing is lost, and the pieces do not matter."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.text.tool_calls import ToolCallFormat, ToolCallParser, ToolCallPiece

HERMES, LLAMA = ToolCallFormat.HERMES, ToolCallFormat.LLAMA
Call = tuple[str, str]  # name, arguments
SAME = None  # the content is the whole text


def read(
    form: ToolCallFormat, texts: Iterable[str], most: int | None = None
) -> tuple[str, list[Call]]:
    """Content and calls of a text that comes in pieces."""
    parser = ToolCallParser(form, most)
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for piece in [piece for text in texts for piece in parser.push(text)] + parser.flush():
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece.index == len(names)
            names.append(piece.name)
            arguments.append(piece.arguments)
        else:
            assert piece.index == len(names) - 1
            arguments[-1] += piece.arguments
    assert parser.n_calls == len(names)
    return content, list(zip(names, arguments, strict=True))


def written(form: ToolCallFormat, name: str, arguments: str) -> str:
    if form is HERMES:
        return (
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        )
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "Just text. ", "Just text. ", []),
        (HERMES, 'Wait.\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n', "Wait.",
         [("f", '{"a":1}')]),
        (HERMES, '<tool_call>{"arguments": {"é": "\\n"}, "name": "f"}</tool_call>', "",
         [("f", '{"é": "\\n"}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "",
         [("f", '{"a": "</tool_call>"}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [</tool_call>\nYes.', "\nYes.",
         [("f", '{"a": [')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "f", "argum', SAME, []),
        (HERMES, "\n<tool_call>none</tool_call>", SAME, []),
        (HERMES, '<tool_call>{"name": 1}</tool_call>', SAME, []),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', SAME, []),
        (HERMES, '<tool_call><tool_call>{"name":"f","arguments":{}}', "<tool_call>", [("f", "{}")]),
        (HERMES, '{"name": "f", "parameters": {}}', SAME, []),
        (LLAMA, ' {"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
        (LLAMA, '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA, 'So: <|python_tag|>{"name": "f", "parameters": {}} ', "So:", [("f", "{}")]),
        (LLAMA, 'So: {"name": "f", "parameters": {}}', SAME, []),
        (LLAMA, '{"name": "f", "age": 3}', SAME, []),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        (LLAMA, '{"name": "f", "parameters": {}} Done.', " Done.", [("f", "{}")]),
        (LLAMA, "<|python_tag|>print(1)", SAME, []),
    ],
)  # fmt: skip
def test_calls_are_told_from_content(
    form: ToolCallFormat, text: str, content: str | None, calls: list[Call]
) -> None:
    expected = (text if content is SAME else content, calls)
    assert read(form, [text]) == expected
    assert read(form, text) == expected, "one character after the other"


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f", "arguments": ',
    '{"name": "g", "parameters": ', "{", "}", "}}", '"', "\\", ";", "\n", " ", "<", "a",
    '{"a": 1}', '"arguments"', '"name": "h"', ", ", ": ", "é",
)  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(
    form=st.sampled_from(ToolCallFormat),
    text=texts,
    cuts=st.lists(st.integers(0, 80)),
    most=st.sampled_from([1, None]),
)
def test_the_cuts_of_a_text_do_not_matter(
    form: ToolCallFormat, text: str, cuts: list[int], most: int | None
) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert read(form, pieces, most) == read(form, [text], most)


@given(form=st.sampled_from(ToolCallFormat), text=texts)
@example(HERMES, " <tool_call> {")
def test_content_is_the_text_without_the_calls(form: ToolCallFormat, text: str) -> None:
    """The content keeps its order; a text without a call stays as it is."""
    content, calls = read(form, [text])
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(char in rest for char in content), "something new, or not in this order"
    for _, arguments in calls:
        assert arguments in text or json.loads(arguments) is not None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a"\\<>{}[]é\n', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("xyz", max_size=3), values, max_size=3)


@given(
    form=st.sampled_from(ToolCallFormat),
    calls=st.lists(
        st.tuples(st.text('fg."\\é', min_size=1, max_size=6), arguments), min_size=1, max_size=3
    ),
    spaced=st.booleans(),
    data=st.data(),
)
def test_calls_that_were_written_are_read(
    form: ToolCallFormat, calls: list[tuple[str, dict[str, Any]]], spaced: bool, data: st.DataObject
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    expected = [
        (name, json.dumps(values, ensure_ascii=False, separators=separators))
        for name, values in calls
    ]
    glue = "\n" if form is HERMES else "; "
    text = glue.join(written(form, *call) for call in expected)
    cut = data.draw(st.integers(0, len(text)))
    assert read(form, [text[:cut], text[cut:]]) == ("", expected)
    assert read(form, [text[:cut], text[cut:]], most=1) == ("", expected[:1])
    if form is HERMES:
        assert read(form, ["Let me see.\n\n", text[:cut], text[cut:]]) == ("Let me see.", expected)


def test_a_call_is_passed_on_before_it_is_complete() -> None:
    """A name comes once it is known, arguments as they come, text that is no call at once."""
    parser = ToolCallParser(HERMES)
    assert parser.push("So <") == ["So"]
    assert parser.push("b>") == [" <b>"]
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"a') == [ToolCallPiece(0, "f", ""), ToolCallPiece(0, None, '{"a')]
    assert parser.push('": 1') == [ToolCallPiece(0, None, '": 1')]
    assert parser.push("}}") == [ToolCallPiece(0, None, "}")]


def test_text_after_the_last_allowed_call_is_ignored() -> None:
    parser = ToolCallParser(HERMES, most=1)
    parser.push('<tool_call>{"name": "f", "arguments": {')
    assert not parser.is_over
    parser.push("}")
    assert parser.is_over
    assert parser.push(" more") == parser.flush() == []
