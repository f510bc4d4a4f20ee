"""The parts of a model's answer, in the order of its text: reasoning, content, calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvasir.server.text.reasoning import ReasoningParser
from kvasir.server.text.tool_calls import Piece, ToolCallParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the reasoning."""

    text: str


AnswerPiece = Reasoning | Piece


class AnswerParser:
    """A parser from one choice's text to the parts of its answer.

    n_reasoning: tokens up to the end of the reasoning. is_over: the rest of the text is ignored.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self.n_reasoning = 0
        self.is_over = False
        self._n_tokens = 0
        self._reasoning, self._calls = reasoning, calls

    @property
    def calls_end_it(self) -> bool:
        """True if it has calls, and the last one is complete."""
        return self._calls is not None and self._calls.n_calls > 0 and not self._calls.is_in_call

    def push(self, text: str, n_tokens: int = 0) -> list[AnswerPiece]:
        """Return the parts that more text, of so many tokens, completes."""
        self._n_tokens += n_tokens
        return self._read(text)

    def flush(self, *, is_cut: bool) -> list[AnswerPiece]:
        """Return what was held back, at the end of the text; is_cut: more would have come."""
        pieces = self._read("", is_end=True)
        if self._calls is not None:
            pieces += self._calls.flush(is_cut=is_cut)
        return pieces

    def _read(self, text: str, *, is_end: bool = False) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._reasoning is not None:
            was_open = self._reasoning.is_open
            thought, text = self._reasoning.push(text, is_end=is_end)
            if was_open or self._reasoning.is_open:
                self.n_reasoning = self._n_tokens
            if thought:
                pieces.append(Reasoning(thought))
        content: Iterable[Piece] = [text] if text else []
        if self._calls is not None:
            content = self._calls.push(text)
            self.is_over = self._calls.is_over
        return [*pieces, *content]
