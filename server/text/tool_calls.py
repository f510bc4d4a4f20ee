"""Calls of functions in what a model writes: found as the text comes, whatever pieces it comes in.

A call begins where its function's name and the brace that opens its arguments have come; from then on its arguments
are given out as they are, even where they turn out to be no JSON. All that is no call stays content, and nothing is
lost but whitespace around calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from pydantic_core import from_json


class ToolCallFormat(StrEnum):
    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": …}</tool_call>, one after the other, behind any text
    LLAMA = "llama"  # {"name": …, "parameters": …}; …: from the text's start on, or behind <|python_tag|>

    @property
    def opening(self) -> str:
        return "<tool_call>" if self is ToolCallFormat.HERMES else "<|python_tag|>"

    @property
    def closing(self) -> str:
        return "</tool_call>" if self is ToolCallFormat.HERMES else ";"

    @property
    def tags(self) -> frozenset[str]:
        """What may be special tokens."""
        return frozenset(
            {"<tool_call>", "</tool_call>"} if self is ToolCallFormat.HERMES else {"<|python_tag|>"}
        )


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """Something of a call: its name where it begins, more of its arguments' JSON afterwards."""

    index: int
    name: str | None
    arguments: str


Piece = str | ToolCallPiece

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _State(Enum):
    TEXT = "content, up to the next call"
    HEAD = "an object that may be a call"
    ARGUMENTS = "the arguments of a call"
    CLOSING = "what closes a call"
    OVER = "behind the last call that may be"


class ToolCallParser:
    """Pieces of content and calls from pieces of text. `most`: calls; what follows them is left out."""

    def __init__(self, form: ToolCallFormat, most: int | None = None) -> None:
        self.n_calls = 0
        self._form = form
        self._most = most
        self._state = _State.TEXT
        self._buffer = ""
        self._before = ""  # of a call, what will be content if it is none
        self._is_tagged = False
        self._at_start = (
            True  # of the text, or behind a call: nothing but whitespace has come since
        )
        self._object = _ObjectEnd()
        self._expected: Sequence[str] = ()

    @property
    def is_over(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self._state is _State.OVER

    @property
    def is_in_call(self) -> bool:
        """Whether the arguments of a call have not ended yet."""
        return self._state is _State.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._read(is_end=False)

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> list[Piece]:
        steps = {
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.CLOSING: self._read_closing,
        }
        pieces: list[Piece] = []
        while self._state is not _State.OVER:
            before = self._state
            pieces += steps[before](is_end)
            if self._state is before:  # more text must tell
                break
        return pieces

    def _read_text(self, is_end: bool) -> list[Piece]:
        buffer, opening = self._buffer, self._form.opening
        text = buffer.lstrip()
        if self._at_start and self._form is ToolCallFormat.LLAMA and text.startswith("{"):
            return self._open(len(buffer) - len(text), "")
        at = buffer.find(opening)
        if at >= 0:
            return self._open(at, opening)
        if is_end:
            self._buffer = ""
            return [] if self.n_calls and self._at_start and not text else self._content(buffer)
        shown = buffer[: len(buffer) - _n_begun(buffer, opening)].rstrip()
        self._buffer = buffer[len(shown) :]
        return self._content(shown)

    def _open(self, at: int, opening: str) -> list[Piece]:
        """A call may begin at that place of the buffer."""
        text = self._buffer[:at]
        shown = text.rstrip()
        self._before = text[len(shown) :] + opening
        self._buffer = self._buffer[at + len(opening) :]
        self._is_tagged = bool(opening)
        self._object = _ObjectEnd()
        self._state = _State.HEAD
        return self._content(shown)

    def _read_head(self, is_end: bool) -> list[Piece]:
        text = self._buffer.lstrip()
        space = len(self._buffer) - len(text)
        if text and text[0] != "{":
            return self._refuse(0)
        if (head := _HEAD.match(text)) and (name := _name(head[1])) is not None:
            self._buffer = text[head.end() :]
            self._object = _ObjectEnd()
            self._expected = ("}", self._form.closing)
            self._state = _State.ARGUMENTS
            return [self._begin(name)]
        end = self._object.find(text)
        if end is None:
            return self._refuse(len(self._buffer)) if is_end else []
        call = (
            None
            if self._object.is_broken
            else _call(text[:end], may_lack_arguments=self._is_tagged)
        )
        if call is None:
            return self._refuse(space + end)
        self._buffer = text[end:]
        self._expected = (self._form.closing,)
        self._state = _State.CLOSING
        name, arguments = call
        return [self._begin(name), ToolCallPiece(self.n_calls - 1, None, arguments)]

    def _begin(self, name: str) -> ToolCallPiece:
        self.n_calls += 1
        return ToolCallPiece(self.n_calls - 1, name, "")

    def _refuse(self, n: int) -> list[Piece]:
        """It is no call: what came before it, and the buffer's first `n` characters, are content."""
        text, self._buffer = self._before + self._buffer[:n], self._buffer[n:]
        self._state = _State.TEXT
        return self._content(text)

    def _read_arguments(self, is_end: bool) -> list[Piece]:  # noqa: ARG002  (the end is the end of the arguments)
        end = self._object.find(self._buffer)
        text, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        self._object.forget()
        if end is not None:
            self._state = _State.CLOSING
        return [ToolCallPiece(self.n_calls - 1, None, text)] if text else []

    def _read_closing(self, is_end: bool) -> list[Piece]:
        if self.n_calls == self._most:
            self._state = _State.OVER
            return []
        at = 0
        for expected in self._expected:  # either may be missing
            text = self._buffer[at:].lstrip()
            if text.startswith(expected):
                at = len(self._buffer) - len(text) + len(expected)
            elif expected.startswith(text) and not is_end:
                return []
        self._buffer = self._buffer[at:]
        self._at_start = True
        self._state = _State.TEXT
        return []

    def _content(self, text: str) -> list[Piece]:
        if not text:
            return []
        self._at_start = False
        return [text]


class _ObjectEnd:
    """Where a JSON object ends of which the beginning grows, or where it cannot be JSON any more."""

    def __init__(self) -> None:
        self.is_broken = False
        self._n_read = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The place behind the object in `text`, which begins with what was there at the last call."""
        for at in range(self._n_read, len(text)):
            char = text[at]
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == "<":  # a tag, where the closing braces are missing
                self.is_broken = True
                return at
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        self._n_read = len(text)
        return None

    def forget(self) -> None:
        """The next text begins behind what has been read."""
        self._n_read = 0


def _n_begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins a tag."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0
    )


def _name(literal: str) -> str | None:
    try:
        return str(from_json(literal))
    except ValueError:
        return None


def _call(text: str, *, may_lack_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments of a call whose keys stand in another order, if it is one."""
    try:
        call: dict[str, Any] = from_json(text, allow_inf_nan=False)
        found = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(call.get("name"), str) or not (found or may_lack_arguments):
            return None
        arguments: Any = next((value for value in found if value is not None), {})
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(
            arguments, ensure_ascii=False
        )
    except ValueError:
        return None
