"""Reasoning in a model's text: nothing is lost, and the pieces do not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.server.text.answer import AnswerParser, Reasoning
from kvasir.server.text.reasoning import ReasoningFormat, ReasoningParser
from kvasir.server.text.tool_calls import ToolCallParser, ToolCallPiece
from kvasir.server.text.tool_formats import ToolCallFormat

THINK = ReasoningFormat.THINK


def read(text: str, cuts: list[int], *, is_open: bool) -> tuple[str, str, list[str]]:
    """Reasoning, content and calls of a text that is cut at these places."""
    calls = ToolCallParser(ToolCallFormat.HERMES)
    parser = AnswerParser(ReasoningParser(THINK, is_open=is_open), calls)
    places = [0, *sorted(cuts), len(text)]
    pieces = [one for start, end in pairwise(places) for one in parser.push(text[start:end], 1)]
    pieces += parser.flush(is_cut=False)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    found = [piece for piece in pieces if isinstance(piece, ToolCallPiece)]
    return reasoning, content, [f"{piece.name or ''}{piece.arguments}" for piece in found]


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, "Hm.", "Yes. "),
        ("\n<think>Hm.", False, "Hm.", ""),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("\n\n</think>\n\nYes.", True, "", "Yes."),
        (" Yes <think>no</think>", False, "", " Yes <think>no</think>"),
        ("<thi", False, "", "<thi"),
        ("a </th", True, "a", ""),
        ("a <", True, "a <", ""),
        ("a</think>b</think>", True, "a", "b</think>"),
    ],
)
def test_reasoning_is_told_from_content(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    assert read(text, [], is_open=is_open) == (reasoning, content, [])
    assert read(text, [*range(len(text))], is_open=is_open) == (reasoning, content, [])


CALL = '{"name": "f", "arguments": {}}'
FRAGMENTS = (
    *("<think>", "</think>", "<", "</", "\n", " ", "a", "think>"),
    *("<tool_call>", "</tool_call>", CALL),
)


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 60)),
    is_open=st.booleans(),
)
def test_the_cuts_of_a_text_do_not_matter(text: str, cuts: list[int], is_open: bool) -> None:
    reasoning, content, calls = read(text, [], is_open=is_open)
    cut = read(text, cuts, is_open=is_open)
    assert (cut[0], cut[1], "".join(cut[2])) == (reasoning, content, "".join(calls))
    assert not (calls and "</think>" not in text and (is_open or text.lstrip()[:7] == "<think>"))
    rest = iter(text)
    assert all(char in rest for char in reasoning + content), "something new, or out of order"
