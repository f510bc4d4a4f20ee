"""Calls in a model's text: nothing is lost, and the pieces do not matter."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir.server.text.tool_calls import ToolCallParser, ToolCallPiece
from kvasir.server.text.tool_formats import DEEPSEEK_TAGS, ToolCallFormat

HERMES, LLAMA = ToolCallFormat.HERMES, ToolCallFormat.LLAMA
LISTS = (ToolCallFormat.MISTRAL, ToolCallFormat.GRANITE)
Call = tuple[str, str]  # name, arguments
SAME = None  # the content is the whole text


def read(
    form: ToolCallFormat,
    texts: Iterable[str],
    most: int | None = None,
    *,
    schemas: Any = None,
    is_cut: bool = False,
) -> tuple[str, list[Call]]:
    """Content and calls of a text that comes in pieces."""
    parser = ToolCallParser(form, most, schemas)
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for piece in [piece for text in texts for piece in parser.push(text)] + parser.flush(
        is_cut=is_cut
    ):
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


def written(form: ToolCallFormat, calls: list[Call]) -> str:
    """Return the text in which a model of the format writes calls."""
    begin, call, sep, call_end, end = DEEPSEEK_TAGS
    in_list = ", ".join(
        f'{{"name": {json.dumps(n)}, "arguments": {a}, "id": "x}}"}}' for n, a in calls
    )
    parts: list[str] = []
    for name, arguments in calls:
        quoted = json.dumps(name)
        if form is HERMES:
            part = f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>\n'
        elif form is LLAMA:
            part = f'{{"name": {quoted}, "parameters": {arguments}}}; '
        elif form is ToolCallFormat.MISTRAL_ARGS:
            part = f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        elif form is ToolCallFormat.DEEPSEEK:
            part = f"{call}function{sep}{name}\n```json\n{arguments}\n```{call_end}\n"
        elif form is ToolCallFormat.DEEPSEEK_V31:
            part = f"{call}{name}{sep}{arguments}{call_end}"
        elif form is ToolCallFormat.QWEN_CODER:
            values = "".join(
                f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
                for k, v in json.loads(arguments).items()
            )
            part = f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>\n"
        elif form is ToolCallFormat.PYTHONIC:
            part = f"{name}({', '.join(f'{k}={v!r}' for k, v in json.loads(arguments).items())})"
        parts.append(part if form not in LISTS else "")
    if form in LISTS:
        return f"{form.opening}[{in_list}]"
    if form is ToolCallFormat.PYTHONIC:
        return f"[{', '.join(parts)}]"
    text = "".join(parts).rstrip("; \n")
    return f"{begin}{text}{end}" if form.opening == begin else text


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
    '{"a": 1}', '"arguments"', '"name": "h"', ", ", ": ", "é", "[TOOL_CALLS]", "[", "]", "f", "(",
    "[ARGS]", "<|tool_call|>", *DEEPSEEK_TAGS, "```", "<function=f>", "<parameter=a>", "x=1", ")",
    "</parameter>", "</function>",
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


JSON_NAMES = st.text('fg."\\é', min_size=1, max_size=6)
BARE_NAMES = st.sampled_from(["f", "get_x"])
ANY_VALUE: dict[str, Any] = {"properties": {key: {} for key in ("x", "yy", "z")}}


@pytest.mark.parametrize("form", ToolCallFormat)
@settings(max_examples=40)
@given(data=st.data(), spaced=st.booleans())
def test_calls_that_were_written_are_read(
    form: ToolCallFormat, data: st.DataObject, spaced: bool
) -> None:
    names = JSON_NAMES if form in (HERMES, LLAMA, *LISTS) else BARE_NAMES
    keys = st.sampled_from(["x", "yy", "z"])
    values_of = arguments
    if form is ToolCallFormat.QWEN_CODER:  # which has no quotation marks
        words = st.text("a b<é\n", max_size=5).map(str.strip)
        values_of = st.dictionaries(keys, words | st.integers() | st.just([{"a": None}]))
    elif form is ToolCallFormat.PYTHONIC:
        values_of = st.dictionaries(keys, values)
    calls = data.draw(st.lists(st.tuples(names, values_of), min_size=1, max_size=3))
    separators = (", ", ": ") if spaced else (",", ":")
    given = [(n, json.dumps(v, ensure_ascii=False, separators=separators)) for n, v in calls]
    text = written(form, given)
    cut = data.draw(st.integers(0, len(text)))
    schemas = dict.fromkeys(["f", "get_x"], ANY_VALUE)
    lead = "" if form in (LLAMA, ToolCallFormat.PYTHONIC) else "Let me see.\n\n"
    for most in (None, 1):
        content, found = read(form, [lead, text[:cut], text[cut:]], most, schemas=schemas)
        assert content == lead.rstrip()
        assert [(n, json.loads(a)) for n, a in found] == calls[:most]
        if form not in (ToolCallFormat.QWEN_CODER, ToolCallFormat.PYTHONIC):
            assert found == given[:most], "as the model wrote them"
    content, cut_short = read(form, [lead + text[:cut]], is_cut=True, schemas=schemas)
    if cut > 1 and lead:
        assert content == lead.rstrip(), "the beginning of a call is no content"
    assert [n for n, _ in cut_short] == [n for n, _ in given[: len(cut_short)]]


def test_an_argument_without_quotation_marks_has_the_type_of_its_schema() -> None:
    kinds = {"a": "string", "b": "integer", "c": ["string", "null"], "d": "boolean"}
    schemas = {"f": {"properties": {key: {"type": kind} for key, kind in kinds.items()}}}
    for key, text, value in (
        ("a", "1", "1"), ("b", "1", 1), ("b", "one", "one"), ("c", "1", "1"), ("c", "null", None),
        ("d", "true", True), ("unknown", "1", "1"),
    ):  # fmt: skip
        call = f"<tool_call><function=f><parameter={key}>{text}</parameter></function></tool_call>"
        _, ((_, arguments),) = read(ToolCallFormat.QWEN_CODER, [call], schemas=schemas)
        assert json.loads(arguments) == {key: value}


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
