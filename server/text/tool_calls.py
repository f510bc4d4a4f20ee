"""Function calls in the text of a model, found as the text comes, in whatever pieces.

A call begins once its function's name and the brace that opens its arguments have come. From then
on its arguments are passed on as they are, even if they turn out not to be JSON. Everything else is
content; only whitespace around calls is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kvasir.server.text.reasoning import begun
from kvasir.server.text.tool_arguments import Scanner, bare_call, json_call, python_calls, value_of
from kvasir.server.text.tool_formats import Bare, Named, Python, Tagged, ToolCallFormat

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each function, by its name

_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD = 512  # characters


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of a call: first its name, then pieces of its arguments' JSON."""

    index: int
    name: str | None
    arguments: str


Piece = str | ToolCallPiece
Reading = Generator[None, None, None]  # it yields wherever it needs more text


class ToolCallParser:
    """A parser from text to content and calls; it ignores all text after the call number `most`.

    schemas: of the functions, for formats whose arguments are no JSON.
    """

    def __init__(
        self, form: ToolCallFormat, most: int | None = None, schemas: Schemas | None = None
    ) -> None:
        self.n_calls = 0
        self.is_over = False  # `most` calls are complete
        self.is_in_call = False  # the arguments of a call have begun and not ended
        self._form, self._most, self._schemas = form, most, schemas or {}
        self._buffer = ""  # text that is not read yet
        self._is_end = False  # no more text will come
        self._is_cut = False  # and the model would have written more
        self._at_start = True  # only whitespace since the start of the text or the last call
        self._in_block = form is ToolCallFormat.LLAMA  # calls may come without the opening
        self._pieces: list[Piece] = []
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""
        self._buffer += text
        self._pieces = []
        next(self._reading, None)
        return self._pieces

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back, at the end of the text.

        is_cut: the model would have written more, so the beginning of a call is no content.
        """
        self._is_end, self._is_cut = True, is_cut
        return self.push("")

    def _read(self) -> Reading:
        while not self.is_over:
            opening = self._find_opening()
            if opening is None:
                if self._is_end:
                    break
                yield
            elif isinstance(inside := self._form.inside, Python):
                yield from self._read_python(opening)
            elif isinstance(inside, Tagged):
                yield from self._read_tagged(opening, inside)
            elif isinstance(inside, Named):
                yield from self._read_named(opening, inside.head)
            elif isinstance(inside, Bare):
                yield from self._read_bare(opening, inside)
            else:
                yield from self._read_call(opening)

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
        buffer, tag, following = self._buffer, self._form.opening, self._form.following
        start = buffer.lstrip()
        n_space = len(buffer) - len(start)
        if self._at_start and following and self._in_block:
            if start.startswith(following):
                return self._take(n_space)
            if following.startswith(start) and (self._is_cut or not self._is_end):
                return None
        is_content = tag == "[" and not (
            self._at_start and not self.n_calls and start.startswith(tag)
        )
        at = -1 if is_content else buffer.find(tag)
        if at >= 0:
            self._in_block = True
            n_content = len(buffer[:at].rstrip())
            self._show(self._take(n_content))
            return self._take(at + len(tag) - n_content)
        n_begun = begun(buffer, tag)
        if not self._is_end or (self._is_cut and (n_begun > 1 or (n_begun and self._at_start))):
            self._show(self._take(len(buffer[: len(buffer) - n_begun].rstrip())))
        elif buffer.strip() or not (self.n_calls and self._at_start):  # else space after a call
            self._show(self._take(len(buffer)))
        return None

    def _is_tagged(self, opening: str) -> bool:
        return bool(opening.strip()) or self._form is not ToolCallFormat.LLAMA

    def _end_early(self, opening: str) -> None:
        """Show the beginning of a call, with which the text ends, as content unless it is cut."""
        rest = self._take(len(self._buffer))
        if not (self._is_cut and self._is_tagged(opening)):
            self._show(opening + rest)

    def _read_call(self, opening: str) -> Reading:
        """Read a call in JSON; show the opening, and what follows it, as content if it is none."""
        scanner, end, n_scanned = Scanner(), None, 0
        while end is None:
            text = self._buffer.lstrip()
            is_first = "]" in self._form.closings and opening.endswith(self._form.opening)
            if text[:1] == "[" and is_first:  # the brackets of a list
                opening += self._take(len(self._buffer) - len(text) + 1)
                continue
            if text and text[0] != "{":
                return self._show(opening)
            if head := _JSON_HEAD.match(text, 0, _MAX_HEAD):
                name = None
                with suppress(ValueError):  # such as half of a surrogate pair
                    name = str(from_json(head[1]))
                if name is not None:
                    self._begin_call(name, text[head.end() :])
                    return (yield from self._read_arguments())
            if (end := scanner.scan(text[n_scanned:])) is None:
                if self._is_end:
                    return self._end_early(opening)
                n_scanned = len(text)
                yield
        end += n_scanned
        call = json_call(text[:end], is_tagged=self._is_tagged(opening))
        if call is None:
            return self._show(opening + self._take(len(self._buffer) - len(text) + end))
        self._begin_call(call[0], text[end:])
        self._add(call[1])
        return (yield from self._read_closing())

    def _read_named(self, opening: str, head: re.Pattern[str]) -> Reading:
        """Read a call whose name precedes its arguments."""
        while (match := head.match(text := self._buffer.lstrip())) is None:
            if "{" in text or len(text) > _MAX_HEAD:
                return self._show(opening)
            if self._is_end:
                return self._end_early(opening)
            yield
        self._begin_call(match[1], text[match.end() :])
        return (yield from self._read_arguments())

    def _read_tagged(self, opening: str, tags: Tagged) -> Reading:
        """Read a call whose arguments have tags; each is passed on once it is complete."""
        while (match := tags.head.match(text := self._buffer.lstrip())) is None:
            if not tags.may_begin(text) or len(text) > _MAX_HEAD:
                return self._show(opening)
            if self._is_end:
                return self._end_early(opening)
            yield
        name, before, n_read, self.is_in_call = match[1], "{", 0, True  # n_read: without an end
        self._begin_call(name, text[match.end() :])
        while self.is_in_call:
            text = self._buffer.lstrip()
            if text.find(tags.last, n_read) >= 0 and (match := tags.argument.match(text)):
                argument = {match[1]: value_of(match[2], self._schemas.get(name, {}), match[1])}
                self._add(before + json.dumps(argument, ensure_ascii=False)[1:-1])
                self._buffer, before, n_read = text[match.end() :], ", ", 0
            elif tags.begin.startswith(text[: len(tags.begin)]):  # of which the end is to come
                if self._is_end:
                    self._buffer = ""
                    return None
                n_read = max(0, len(text) - len(tags.last))
                yield
            else:
                self.is_in_call = False
        self._add("}" if before == ", " else "{}")
        return (yield from self._read_closing(*filter(None, [tags.end])))

    def _read_bare(self, opening: str, form: Bare) -> Reading:
        """Read a call with bare keys, which is passed on once it is complete."""
        while self._form.closings[0] not in self._buffer and not self._is_end:
            yield
        text, closing, rest = self._buffer.partition(self._form.closings[0])
        if (call := bare_call(text, form.head, form.quote)) is None:
            return self._show(opening) if closing else self._end_early(opening)
        self._begin_call(call[0], closing + rest)
        self._add(call[1])
        return (yield from self._read_closing())

    def _read_python(self, opening: str) -> Reading:
        """Read a list of calls in Python, which is passed on once it is complete."""
        scanner, end, n_scanned = Scanner(is_python=True, depth=1), None, 0
        while end is None:
            if Python.head.match(self._buffer, 0, _MAX_HEAD) is None:
                return self._show(opening)
            end = scanner.scan(self._buffer[n_scanned:])
            if end is None:
                if self._is_end:
                    return self._end_early(opening)
                n_scanned = len(self._buffer)
                yield
        end += n_scanned
        calls = python_calls(f"[{self._buffer[:end]}")
        if not calls:
            return self._show(opening)
        self._take(end)
        for name, arguments in calls[: self._most]:
            self._begin_call(name, self._buffer)
            self._add(arguments)
        return (yield from self._read_closing())

    def _begin_call(self, name: str, rest: str) -> None:
        self._buffer = rest
        self._pieces.append(ToolCallPiece(self.n_calls, name, ""))
        self.n_calls += 1

    def _add(self, arguments: str) -> None:
        self._pieces.append(ToolCallPiece(self.n_calls - 1, None, arguments))

    def _read_arguments(self) -> Reading:
        scanner, end = Scanner(), None
        self.is_in_call = True
        while end is None:
            end = scanner.scan(self._buffer)
            if text := self._take(len(self._buffer) if end is None else end):
                self._add(text)
            if end is None:
                if self._is_end:
                    return
                yield
        self.is_in_call = False
        if isinstance(self._form.inside, Named):
            return (yield from self._read_closing())
        if self.n_calls != self._most:
            yield from self._skip_others()
        return (yield from self._read_closing("}"))

    def _skip_others(self) -> Reading:
        """Skip what a call in JSON holds after its arguments, such as its id."""
        while not (text := self._buffer.lstrip()):
            if self._is_end:
                return
            yield
        scanner, end = Scanner(depth=1), None
        while text[0] == "," and end is None:
            end = scanner.scan(self._buffer)
            self._take(len(self._buffer) if end is None else end)
            if end is None:
                if self._is_end:
                    return
                yield

    def _read_closing(self, *before: str) -> Reading:
        """Skip what closes a call, of which every part may be missing."""
        self.is_over = self.n_calls == self._most
        if self.is_over:
            return
        for part in (*before, *self._form.closings):
            while (text := self._buffer.lstrip()) != part and part.startswith(text):
                if self._is_end:
                    self._buffer = "" if self._is_cut else self._buffer
                    break
                yield
            if text.startswith(part):
                self._buffer = text[len(part) :]
                self._in_block &= part not in self._form.ends
        self._at_start = True
