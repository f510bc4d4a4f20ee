"""Reasoning before an answer, found as the text comes, in whatever pieces."""

from __future__ import annotations

from enum import Enum


class ReasoningFormat(Enum):
    """The formats of reasoning: the text before it, and the text after it."""

    THINK = ("<think>", "</think>")
    MISTRAL = ("[THINK]", "[/THINK]")
    SEED = ("<seed:think>", "</seed:think>")
    COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
    GEMMA = ("<|channel>thought\n", "<channel|>")

    def __init__(self, opening: str, closing: str) -> None:
        self.opening = opening
        self.closing = closing
        self.tags = frozenset({opening.removesuffix("thought\n"), closing})

    def is_begun(self, prompt: str) -> bool:
        """Return whether a prompt ends where reasoning begins."""
        return prompt.rstrip().endswith(self.opening.rstrip())

    def leaves_open(self, text: str) -> bool:
        """Return whether the beginning of an answer ends inside its reasoning."""
        return text.lstrip().startswith(self.opening) and self.closing not in text

    def is_over(self, prompt: str) -> bool:
        """Return whether a prompt ends after reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.closing)


class ReasoningParser:
    """A parser from text to reasoning, which may only begin it, and the rest, the answer.

    The tags and the whitespace around reasoning are lost. is_open: it has begun and not ended.
    continues: the text continues a part, so whitespace at its start belongs to it.
    """

    def __init__(
        self, form: ReasoningFormat, *, is_open: bool = False, continues: bool = False
    ) -> None:
        self.is_open = is_open
        self._form = form
        self._buffer = ""  # text that is not returned yet
        self._may_open = not is_open
        self._strips = not continues  # whitespace at the start of the part is lost

    def push(self, text: str, *, is_end: bool = False) -> tuple[str, str]:
        """Return the reasoning and the answer that more text, or the end of it, completes."""
        self._buffer += text
        reasoning = ""
        if self._may_open:
            start, opening = self._buffer.lstrip(), self._form.opening
            if opening.startswith(start) and not is_end:
                return "", ""
            self._may_open = False
            self.is_open = self._strips = start.startswith(opening)
            if self.is_open:
                self._buffer = start[len(opening) :]
        if self.is_open:
            reasoning, tag, rest = self._buffer.partition(self._form.closing)
            n_begun = 0 if tag else begun(reasoning, self._form.closing)
            if n_begun > 1 or not is_end:
                reasoning = reasoning[: len(reasoning) - n_begun]
            reasoning = reasoning.rstrip()
            self._buffer = rest if tag or is_end else self._buffer[len(reasoning) :]
            reasoning = self._strip(reasoning)
            if not tag:
                return reasoning, ""
            self.is_open, self._strips = False, True
        answer, self._buffer = self._strip(self._buffer), ""
        return reasoning, answer

    def _strip(self, text: str) -> str:
        """Return text without the whitespace before its part."""
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text


def begun(text: str, tag: str) -> int:
    """Return with how many characters of a tag a text ends, if not with all."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
