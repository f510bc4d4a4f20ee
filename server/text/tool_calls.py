"""Function calls in the text of a model, found as the text comes, in whatever pieces.

A call begins once its function's name and the brace that opens its arguments have come. From then
on its arguments are passed on as they are, even if they turn out not to be JSON. Everything else is
content; only whitespace around calls is lost.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from pydantic_core import from_json

from server.text.reasoning import begun

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each function, by its name

# DeepSeek's tags have a bar and spaces of their own.
_BEGIN, _CALL, _SEP, _CALL_END, _END = DEEPSEEK_TAGS = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# A name, and what leads to arguments in JSON.
_ARGS_HEAD = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_FENCED_HEAD = re.compile(rf"(?:{_CALL})?\s*function{_SEP}([^\s{{}}<]+)\s*```json\s*(?=\{{)")
_SEP_HEAD = re.compile(rf"(?:{_CALL})?\s*([^\s{{}}<]+)\s*{_SEP}\s*(?=\{{)")
_MAX_HEAD = 512  # characters
_FUNCTION = re.compile(r"<function=([^>\s]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_HEAD = re.compile(r"\s*(?:[A-Za-z_][\w.]*\s*(?:\(|\Z)|\Z)")
_dumps = partial(json.dumps, ensure_ascii=False)


class ToolCallFormat(Enum):
    """The formats in which models write calls: the text before a call, and the parts after it.

    HERMES: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one after the other, after any
    text. LLAMA: `{"name": …, "parameters": …}; …`, from the start of the text or after
    `<|python_tag|>`. MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`. GRANITE: such a list
    after `<|tool_call|>`. MISTRAL_ARGS: `[TOOL_CALLS]name[ARGS]{…}`. DEEPSEEK, DEEPSEEK_V31: a
    block of calls, each with a name, a separator and JSON, the first in a fence of Markdown.
    QWEN_CODER: `<tool_call><function=name><parameter=key>value</parameter>…</function>` and
    `</tool_call>`. PYTHONIC: `[name(key=value, …), …]`, from the start of the text.

    following: the beginning of a further call without `opening`. tags: the parts of a format that
    may be special tokens. forced: the format of calls that a grammar enforces.
    """

    HERMES = ("<tool_call>", ("</tool_call>",), "")
    LLAMA = ("<|python_tag|>", (";",), "{")
    MISTRAL = ("[TOOL_CALLS]", (",", "]"), "{")
    MISTRAL_ARGS = ("[TOOL_CALLS]", (), "")
    GRANITE = ("<|tool_call|>", (",", "]", "<|/tool_call|>"), "{")
    DEEPSEEK = (_BEGIN, ("```", _CALL_END, _END), _CALL)
    DEEPSEEK_V31 = (_BEGIN, (_CALL_END, _END), f"{_CALL} ")
    QWEN_CODER = ("<tool_call>", ("</tool_call>",), " ")
    PYTHONIC = ("[", ("]",), "")

    def __init__(self, opening: str, closings: tuple[str, ...], following: str) -> None:
        self.opening = opening
        self.closings = closings
        self.following = following.strip()
        tags = {opening, *closings, self.following, *([_SEP] if opening == _BEGIN else [])}
        if opening == "[TOOL_CALLS]":
            tags |= {"[ARGS]", "[CALL_ID]"}
        self.tags = frozenset(tag for tag in tags if len(tag) > 3)

    @property
    def forced(self) -> ToolCallFormat:
        """The format of calls that must come: one that grammars have."""
        return _FORCED.get(self, self)


_FORCED = {
    ToolCallFormat.QWEN_CODER: ToolCallFormat.HERMES,
    ToolCallFormat.PYTHONIC: ToolCallFormat.LLAMA,
}
_LISTS = (ToolCallFormat.MISTRAL, ToolCallFormat.GRANITE)
_NAMED_HEADS = {
    ToolCallFormat.MISTRAL_ARGS: _ARGS_HEAD,
    ToolCallFormat.DEEPSEEK: _FENCED_HEAD,
    ToolCallFormat.DEEPSEEK_V31: _SEP_HEAD,
}


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
            elif self._form is ToolCallFormat.PYTHONIC:
                yield from self._read_python(opening)
            elif self._form is ToolCallFormat.QWEN_CODER:
                yield from self._read_tagged(opening)
            elif self._form in _NAMED_HEADS:
                yield from self._read_named(opening, _NAMED_HEADS[self._form])
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
        is_content = self._form is ToolCallFormat.PYTHONIC and not (
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
        scanner, end, n_scanned = _Scanner(), None, 0
        while end is None:
            text = self._buffer.lstrip()
            if text[:1] == "[" and self._form in _LISTS and opening.endswith(self._form.opening):
                opening += self._take(len(self._buffer) - len(text) + 1)
                continue
            if text and text[0] != "{":
                return self._show(opening)
            if head := _JSON_HEAD.match(text):
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
        call = _call(text[:end], is_tagged=self._is_tagged(opening))
        if call is None:
            return self._show(opening + self._take(len(self._buffer) - len(text) + end))
        self._begin_call(call[0], text[end:])
        self._add(call[1])
        return (yield from self._read_closing())

    def _read_named(self, opening: str, head: re.Pattern[str]) -> Reading:
        """Read a call whose name precedes its arguments."""
        while (found := head.match(text := self._buffer.lstrip())) is None:
            if "{" in text or len(text) > _MAX_HEAD:
                return self._show(opening)
            if self._is_end:
                return self._end_early(opening)
            yield
        self._begin_call(found[1], text[found.end() :])
        return (yield from self._read_arguments())

    def _read_tagged(self, opening: str) -> Reading:
        """Read a call whose arguments have tags; each is passed on once it is complete."""
        while (found := _FUNCTION.match(text := self._buffer.lstrip())) is None:
            begins = "<function=".startswith(text[:10]) and ">" not in text
            if not begins or len(text) > _MAX_HEAD:
                return self._show(opening)
            if self._is_end:
                return self._end_early(opening)
            yield
        name, before = found[1], "{"
        self._begin_call(name, text[found.end() :])
        self.is_in_call = True
        while self.is_in_call:
            text = self._buffer.lstrip()
            if found := _PARAMETER.match(text):
                value = _value(found[2], self._schemas.get(name, {}), found[1])
                self._add(f"{before}{_dumps(found[1])}: {_dumps(value)}")
                self._buffer, before = text[found.end() :], ", "
            elif "<parameter=".startswith(text[:11]):  # of which the end is to come
                if self._is_end:
                    self._buffer = ""
                    return None
                yield
            else:
                self._add("}" if before == ", " else "{}")
                self.is_in_call = False
        return (yield from self._read_closing("</function>"))

    def _read_python(self, opening: str) -> Reading:
        """Read a list of calls in Python, which is passed on once it is complete."""
        scanner, end, n_scanned = _Scanner(is_python=True, depth=1), None, 0
        while end is None:
            if _PYTHON_HEAD.match(self._buffer) is None:
                return self._show(opening)
            end = scanner.scan(self._buffer[n_scanned:])
            if end is None:
                if self._is_end:
                    return self._end_early(opening)
                n_scanned = len(self._buffer)
                yield
        end += n_scanned
        calls = _python_calls(f"[{self._buffer[:end]}")
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
        scanner, end = _Scanner(), None
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
        if self._form in _NAMED_HEADS:
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
        scanner, end = _Scanner(depth=1), None
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
                self._in_block &= part not in ("]", _END)
        self._at_start = True


@dataclass(slots=True)
class _Scanner:
    """A search for the end of JSON or Python in brackets, of which the text comes in pieces."""

    is_python: bool = False
    depth: int = 0
    _quote: str = ""
    _is_escaped: bool = False

    def scan(self, text: str) -> int | None:
        """Return where it ends in the next piece, or stops being JSON; None if nowhere."""
        for at, char in enumerate(text):
            if self._quote:
                if char == self._quote and not self._is_escaped:
                    self._quote = ""
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == "<" and not self.is_python:  # a tag, where the closing braces are missing
                return at
            elif char == '"' or (char == "'" and self.is_python):
                self._quote = char
            elif char in "{[" or (char == "(" and self.is_python):
                self.depth += 1
            elif char in "}]" or (char == ")" and self.is_python):
                self.depth -= 1
                if not self.depth:
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
            arguments = _dumps(arguments)
        return call["name"], arguments
    except ValueError:
        return None


def _value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return the value of an argument that was written without quotation marks."""
    properties = schema.get("properties")
    kind = properties.get(key) if isinstance(properties, dict) else None
    kinds = kind.get("type") if isinstance(kind, dict) else "string"
    if kinds == "string":
        return text
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return text if "string" in (kinds or ()) and value is not None else value


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of a list of calls with literals by name; [] if it is none."""
    try:
        found = ast.parse(text, mode="eval").body
        calls = found.elts if isinstance(found, ast.List) else []
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("it is no call with arguments by name")
    values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
