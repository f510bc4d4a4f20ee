"""Calls in a model's text: nothing is lost, and the pieces do not matter."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir.server.text.tool_calls import ToolCallParser, ToolCallPiece
from kvasir.server.text.tool_formats import (
    DEEPSEEK_TAGS,
    KIMI_TAGS,
    Bare,
    Python,
    Tagged,
    ToolCallFormat,
)

HERMES, LLAMA = ToolCallFormat.HERMES, ToolCallFormat.LLAMA
LISTS = (
    *(ToolCallFormat.MISTRAL, ToolCallFormat.GRANITE),
    *(ToolCallFormat.NEMOTRON, ToolCallFormat.HUNYUAN),
)
# Their arguments have no quotation marks, or are no JSON.
TAGGED = [form for form in ToolCallFormat if isinstance(form.inside, Tagged)]
REWRITTEN = [form for form in ToolCallFormat if isinstance(form.inside, Tagged | Bare | Python)]
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
    _, kimi_begin, kimi_arguments, kimi_end, _ = KIMI_TAGS
    parts: list[str] = []
    for name, arguments in calls if form not in LISTS else []:
        quoted, values = json.dumps(name), json.loads(arguments)
        if form in TAGGED:
            parts.append(tagged(form, name, values))
        elif isinstance(form.inside, Python):
            parts.append(f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})")
        elif form is ToolCallFormat.GEMMA:
            parts.append(f"<|tool_call>call:{name}{bare(values)}<tool_call|>")
        else:
            written_as = {
                HERMES: (
                    f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>\n'
                ),
                LLAMA: f'{{"name": {quoted}, "parameters": {arguments}}}; ',
                ToolCallFormat.MISTRAL_ARGS: f"[TOOL_CALLS]{name}[ARGS]{arguments}",
                ToolCallFormat.DEEPSEEK: (
                    f"{call}function{sep}{name}\n```json\n{arguments}\n```{call_end}\n"
                ),
                ToolCallFormat.DEEPSEEK_V31: f"{call}{name}{sep}{arguments}{call_end}",
                ToolCallFormat.KIMI: (
                    f"{kimi_begin}functions.{name}:{len(parts)}"
                    f"{kimi_arguments}{arguments}{kimi_end}"
                ),
            }
            parts.append(written_as[form])
    if form in LISTS:
        return f"{form.opening}[{in_list}]"
    if isinstance(form.inside, Python):
        return f"{form.opening}{', '.join(parts)}]" + (form.closings[0] if form.tags else "")
    text = "".join(parts).rstrip("; \n")
    if form in (ToolCallFormat.KIMI, ToolCallFormat.MINIMAX):
        return f"{form.opening}\n{text}{form.closings[-1]}"
    return f"{begin}{text}{end}" if form.opening == begin else text


def tagged(form: ToolCallFormat, name: str, values: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    if form is ToolCallFormat.GLM:
        pairs = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>\n"
    if form is ToolCallFormat.MINIMAX:
        pairs = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in texts.items())
        return f'<invoke name="{name}">\n{pairs}</invoke>\n'
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"{form.opening}\n<function={name}>\n{pairs}</function>\n{form.closings[0]}\n"


def bare(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


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
    "</parameter>", "</function>", *KIMI_TAGS, "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "</invoke>",
    "<|tool_call_start|>[", "<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "<TOOLCALL>",
    "</minimax:tool_call>", "<seed:tool_call>", "f:",
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
@settings(max_examples=20)
@given(data=st.data(), spaced=st.booleans())
def test_calls_that_were_written_are_read(
    form: ToolCallFormat, data: st.DataObject, spaced: bool
) -> None:
    names = JSON_NAMES if form in (HERMES, LLAMA, *LISTS) else BARE_NAMES
    keys = st.sampled_from(["x", "yy", "z"])
    values_of = arguments
    if form in TAGGED:  # which have no quotation marks
        words = st.text("a b<é\n", max_size=5).map(str.strip)
        values_of = st.dictionaries(keys, words | st.integers() | st.just([{"a": None}]))
    elif isinstance(form.inside, Python):
        values_of = st.dictionaries(keys, values)
    elif form is ToolCallFormat.GEMMA:  # whose keys are bare
        values_of = st.dictionaries(keys, st.text('a"\\{}[]:,é\n') | st.lists(st.integers()))
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
        if form not in REWRITTEN:
            assert found == given[:most], "as the model wrote them"
    content, cut_short = read(form, [lead + text[:cut]], is_cut=True, schemas=schemas)
    if cut > 1 and lead:
        assert content == lead.rstrip(), "the beginning of a call is no content"
    assert [n for n, _ in cut_short] == [n for n, _ in given[: len(cut_short)]]


def test_an_argument_without_quotation_marks_has_the_type_of_its_schema() -> None:
    kinds: dict[str, Any] = {"a": "string", "b": "integer", "c": ["string", "null"]}
    kinds |= {"d": "boolean", "e": 5}  # which is no type
    schemas = {"f": {"properties": {key: {"type": kind} for key, kind in kinds.items()}}}
    for key, text, value in (
        ("a", "1", "1"), ("b", "1", 1), ("b", "one", "one"), ("c", "1", "1"), ("c", "null", None),
        ("d", "true", True), ("e", "1", 1), ("unknown", "1", "1"),
    ):  # fmt: skip
        call = f"<tool_call><function=f><parameter={key}>{text}</parameter></function></tool_call>"
        _, ((_, arguments),) = read(ToolCallFormat.QWEN_CODER, [call], schemas=schemas)
        assert json.loads(arguments) == {key: value}


@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_the_text_of_an_argument_is_not_read_again_with_each_piece(
    form: ToolCallFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, call = form.inside, ("f", json.dumps({"a": "b" * 1000}))
    assert isinstance(inside, Tagged)
    match = Mock(side_effect=inside.argument.match)
    monkeypatch.setattr(form, "inside", replace(inside, argument=Mock(match=match)))
    assert read(form, written(form, [call])) == ("", [call])
    assert match.call_count == 1


def test_the_beginning_of_a_call_is_not_read_again_with_each_piece() -> None:
    """One that is too long to be one is read once the call is complete."""
    name = "f" * 1000
    text = f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'
    parser = ToolCallParser(HERMES)
    assert parser.push(text[:-20]) == []
    assert parser.push(text[-20:]) == [
        ToolCallPiece(0, name, ""),
        ToolCallPiece(0, None, '{"a": 1}'),
    ]


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
