"""JSON in pieces: a long answer is written by the text worker while it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pydantic_core import to_json

from kvasir.server.requests.text_worker import TextWorker

FEW = 1024  # values that are written on the event loop, in a few milliseconds
_VALUE_BYTES = 20  # of a value of which JSON is to be made
PIECE = 2**16  # bytes: uvicorn's limit on data that waits to be sent


class LazyList:
    """A list in JSON, of what `make` returns for each of some items; null for None.

    n_each: values in what it makes.
    """

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Any], n_each: int = 1) -> None:
        self.n_values, self._items, self._make = n_each * len(items), items, make

    def __iter__(self) -> Iterator[Any]:
        return (None if item is None else self._make(item) for item in self._items)


class _LongError(Exception):
    """A value that is too long to be encoded at once."""


def _few(value: LazyList) -> list[Any]:
    if value.n_values > FEW:
        raise _LongError
    return list(value)


def _none(_value: LazyList) -> list[Any]:
    raise _LongError


_encoder = partial(json.JSONEncoder, allow_nan=False, separators=(",", ":"))
compact = _encoder(default=_few).encode  # of events
whole = _encoder(default=_none, ensure_ascii=False).encode  # of answers with many short lists


class Pieces:
    """JSON whose long lists are made when it is iterated over; all else is encoded at once."""

    def __init__(self, *values: Any) -> None:
        self._parts = [part for value in values for part in _parts(value)]
        lists = (part for part in self._parts if isinstance(part, LazyList))
        self.n_values = sum(one.n_values for one in lists)

    def __len__(self) -> int:
        """Return about the bytes that it takes until then."""
        known = (len(part) for part in self._parts if isinstance(part, bytes))
        return sum(known) + _VALUE_BYTES * self.n_values

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
                continue
            start = b"["
            for item in part:
                yield start + to_json(item)
                start = b","
            yield b"]" if start == b"," else b"[]"


Written = bytes | Pieces


def _parts(value: Any) -> Iterator[bytes | LazyList]:
    """Yield JSON and lists to be made; bytes are JSON already."""
    if isinstance(value, bytes | LazyList):
        yield value
    elif isinstance(value, Pieces):
        yield from value._parts
    elif isinstance(value, dict) and value:
        for place, (key, one) in enumerate(value.items()):
            yield (b"," if place else b"{") + to_json(key) + b":"
            yield from _parts(one)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | LazyList):
        for place, one in enumerate(value):
            yield b"," if place else b"["
            yield from _parts(one)
        yield b"]"
    else:
        yield to_json(value)


def written(
    value: Any, encode: Callable[[Any], str] = compact, before: str = "", after: str = ""
) -> Written:
    """Return the JSON of a value, between two texts: in pieces if much of it is to be made."""
    try:
        return f"{before}{encode(value)}{after}".encode()
    except _LongError:
        made = Pieces(before.encode(), value, after.encode())
        return b"".join(made) if made.n_values <= FEW else made


def together(some: list[Written]) -> Written:
    """Return several one after the other."""
    return b"".join(some) if all(isinstance(one, bytes) for one in some) else Pieces(*some)  # type: ignore[arg-type]


async def sent(pieces: Iterator[bytes], worker: TextWorker) -> AsyncIterator[bytes]:
    """Yield pieces that a thread makes, joined to larger ones."""
    loop = asyncio.get_running_loop()
    while piece := await loop.run_in_executor(worker, _next, pieces):
        yield piece


def _next(pieces: Iterator[bytes]) -> bytes:
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= PIECE:
            break
    return bytes(found)
