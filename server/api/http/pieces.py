"""JSON in pieces: a long answer is written by the text worker while it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from time import sleep
from typing import Any

from starlette.responses import Response, StreamingResponse

from server.requests.text_worker import TextWorker

FEW = 1024  # values that are written on the event loop, in a few milliseconds
_PIECE = 2**16  # bytes: uvicorn's limit on data that waits to be sent

# JSON, or what makes it in pieces.
Written = bytes | Iterator[bytes]


class LazyList:
    """A list in JSON whose items are made when it is written. n_values: that it has in all."""

    def __init__(self, n_values: int, make: Callable[[], Iterable[Any]]) -> None:
        self.n_values, self._make = n_values, make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


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


def written(
    value: Any, encode: Callable[[Any], str] = compact, before: str = "", after: str = ""
) -> Written:
    """Return the JSON of a value, between two texts.

    Of what has long lists, all else is encoded at once.
    """
    try:
        return f"{before}{encode(value)}{after}".encode()
    except _LongError:
        parts = [before, *_parts(value), after]
    made = _expanded(parts)
    is_short = sum(part.n_values for part in parts if isinstance(part, LazyList)) <= FEW
    return b"".join(made) if is_short else made


def _parts(value: Any) -> Iterator[str | LazyList]:
    if isinstance(value, LazyList):
        yield value
    elif isinstance(value, dict) and value:
        for place, (key, one) in enumerate(value.items()):
            yield f"{',' if place else '{'}{whole(key)}:"
            yield from _parts(one)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for place, one in enumerate(value):
            yield "," if place else "["
            yield from _parts(one)
        yield "]"
    else:
        yield whole(value)


def _expanded(parts: Iterable[str | LazyList]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, str):
            yield part.encode()
            continue
        start = "["
        for item in part:
            yield f"{start}{whole(item)}".encode()
            start = ","
        yield b"]" if start == "," else b"[]"


def together(some: list[Written]) -> Written:
    """Return several one after the other."""
    if all(isinstance(one, bytes) for one in some):
        return b"".join(some)  # type: ignore[arg-type]
    return chain.from_iterable([one] if isinstance(one, bytes) else one for one in some)


async def sent(pieces: Iterator[bytes], worker: TextWorker) -> AsyncIterator[bytes]:
    """Yield what pieces make, in a thread, in larger ones."""
    loop = asyncio.get_running_loop()
    while piece := await loop.run_in_executor(worker, _next, pieces):
        yield piece


def _next(pieces: Iterator[bytes]) -> bytes:
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= _PIECE:
            break
        sleep(0)  # release the interpreter's lock, for which others would wait 5 ms
    return bytes(found)


def json_response(body: Written, worker: TextWorker | None = None) -> Response:
    """Return a response of JSON; a large one is sent in pieces, and streams can send in between.

    In one piece it would be copied whenever a part has been sent, which blocks the event loop.
    """
    headers = {}
    if isinstance(body, bytes):
        if len(body) <= _PIECE:
            return Response(body, media_type="application/json")
        headers["content-length"] = str(len(body))
        content = _slices(body)
    else:
        assert worker is not None
        content = sent(body, worker)
    return StreamingResponse(content, headers=headers, media_type="application/json")


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]
        await asyncio.sleep(0)
