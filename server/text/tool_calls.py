"""Function calls in the text of a model, found as the text comes, in whatever pieces.

A call begins once its function's name and the brace that opens its arguments have come. From then
on its arguments are passed on as they are, even if they turn out not to be JSON. Everything else is
content; only whitespace around calls is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic_core import from_json

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class ToolCallFormat(Enum):
    """The formats in which models write calls: the text before a call, and the text after it.

    HERMES: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one after the other, after any
    text. LLAMA: `{"name": …, "parameters": …}; …`, from the start of the text or after
    `<|python_tag|>`. tags: the parts of a format that may be special tokens.
    """

    HERMES = ("<tool_call>", "</tool_call>")
    LLAMA = ("<|python_tag|>", ";")

    def __init__(self, opening: str, closing: str) -> None:
        self.opening = opening
        self.closing = closing
        self.tags = frozenset({opening, closing} - {";"})


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of a call: first its name, then pieces of its arguments' JSON."""

    index: int
    name: str | None
    arguments: str


Piece = str | ToolCallPiece
Reading = Generator[None, None, None]  # it yields wherever it needs more text


class ToolCallParser:
    """A parser from text to content and calls; it ignores all text after the call number `most`."""

    def __init__(self, form: ToolCallFormat, most: int | None = None) -> None:
        self.n_calls = 0
        self.is_over = False  # `most` calls are complete
        self.is_in_call = False  # the arguments of a call have begun and not ended
        self._form, self._most = form, most
        self._buffer = ""  # text that is not read yet
        self._is_end = False  # no more text will come
        self._at_start = True  # only whitespace since the start of the text or the last call
        self._pieces: list[Piece] = []
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""
        self._buffer += text
        self._pieces = []
        next(self._reading, None)
        return self._pieces

    def flush(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        self._is_end = True
        return self.push("")

    def _read(self) -> Reading:
        while not self.is_over:
            opening = self._find_opening()
            if opening is not None:
                yield from self._read_call(opening)
            elif self._is_end:
                break
            else:
                yield

    def _take(self, n: int) -> str:
        """Remove and return the first characters of the buffer."""
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        return text

    def _show(self, content: str) -> None:
        if content:
            self._at_start = False
            self._pieces.append(content)

    def _find_opening(self) -> str | None:
        """Show content up to a possible call; return its opening with the whitespace before."""
        buffer, tag = self._buffer, self._form.opening
        n_space = len(buffer) - len(buffer.lstrip())
        if self._at_start and self._form is ToolCallFormat.LLAMA and buffer[n_space:][:1] == "{":
            return self._take(n_space)
        at = buffer.find(tag)
        if at >= 0:
            n_content = len(buffer[:at].rstrip())
            self._show(self._take(n_content))
            return self._take(at + len(tag) - n_content)
        if not self._is_end:
            n_begun = next((n for n in range(len(tag) - 1, 0, -1) if buffer.endswith(tag[:n])), 0)
            self._show(self._take(len(buffer[: len(buffer) - n_begun].rstrip())))
        elif buffer.strip() or not (self.n_calls and self._at_start):  # else space after a call
            self._show(self._take(len(buffer)))
        return None

    def _read_call(self, opening: str) -> Reading:
        """Read a call; show the opening, and what follows it, as content if it opens none."""
        scanner, end, n_scanned = _ObjectScanner(), None, 0
        while end is None:
            text = self._buffer.lstrip()
            if text and text[0] != "{":
                return self._show(opening)
            if head := _HEAD.match(text):
                name = None
                with suppress(ValueError):  # such as half of a surrogate pair
                    name = str(from_json(head[1]))
                if name is not None:
                    self._begin_call(name, text[head.end() :])
                    return (yield from self._read_arguments())
            if (end := scanner.scan(text[n_scanned:])) is None:
                if self._is_end:
                    return self._show(opening + self._take(len(self._buffer)))
                n_scanned = len(text)
                yield
        end += n_scanned
        call = _call(text[:end], is_tagged=bool(opening.strip()))
        if call is None:
            return self._show(opening + self._take(len(self._buffer) - len(text) + end))
        self._begin_call(call[0], text[end:])
        self._pieces.append(ToolCallPiece(self.n_calls - 1, None, call[1]))
        return (yield from self._read_closing(self._form.closing))

    def _begin_call(self, name: str, rest: str) -> None:
        self._buffer = rest
        self._pieces.append(ToolCallPiece(self.n_calls, name, ""))
        self.n_calls += 1

    def _read_arguments(self) -> Reading:
        scanner, end = _ObjectScanner(), None
        self.is_in_call = True
        while end is None:
            end = scanner.scan(self._buffer)
            if text := self._take(len(self._buffer) if end is None else end):
                self._pieces.append(ToolCallPiece(self.n_calls - 1, None, text))
            if end is None:
                if self._is_end:
                    return
                yield
        self.is_in_call = False
        yield from self._read_closing("}", self._form.closing)

    def _read_closing(self, *expected: str) -> Reading:
        """Skip what closes a call, of which every part may be missing."""
        self.is_over = self.n_calls == self._most
        if self.is_over:
            return
        for part in expected:
            while (text := self._buffer.lstrip()) != part and part.startswith(text):
                if self._is_end:
                    break
                yield
            if text.startswith(part):
                self._buffer = text[len(part) :]
        self._at_start = True


@dataclass(slots=True)
class _ObjectScanner:
    """A search for the end of a JSON object, of which the text comes in pieces."""

    _depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False

    def scan(self, text: str) -> int | None:
        """Return where the object ends in the next piece, or stops being JSON; None if nowhere."""
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == "<":  # a tag, where the closing braces are missing
                return at
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None


def _call(text: str, *, is_tagged: bool) -> tuple[str, str] | None:
    """Return the name and arguments of a call; only a tagged one may lack arguments."""
    try:
        call: dict[str, Any] = from_json(text, allow_inf_nan=False)
        found = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(call.get("name"), str) or not (found or is_tagged):
            return None
        arguments: Any = next((value for value in found if value is not None), {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call["name"], arguments
    except ValueError:
        return None
