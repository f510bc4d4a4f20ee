"""Answers of JSON: a long one is written by the text worker, in pieces, while it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from numpy.typing import NDArray
from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.requests.text_worker import TextWorker

T = TypeVar("T")

_JSON = "application/json"
FEW = 1024  # values that are written on the event loop, in a few milliseconds
# Of an item of which JSON is to be made, and of each of its values.
_ITEM_BYTES, _VALUE_BYTES = 200, 12
PIECE = 2**16  # bytes: uvicorn's limit on data that waits to be sent


Items = Sequence[Any] | NDArray[Any]


class LazyList:
    """A list in JSON, of what `make` returns for each of some items; null for None.

    n_each: values in what it makes.
    """

    def __init__(self, items: Items, make: Callable[[Any], Any], n_each: int = 1) -> None:
        self.n_values, self._items, self._make = n_each * len(items), items, make
        self.n_bytes = _ITEM_BYTES * len(items) + _VALUE_BYTES * self.n_values

    def __iter__(self) -> Iterator[Any]:
        return (None if item is None else self._make(item) for item in self._items)


class _LongError(Exception):
    """A value that is too long to be encoded at once."""


def _few(value: LazyList) -> list[Any]:
    if value.n_values > FEW:
        raise _LongError
    return list(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_few)


def compact(value: Any) -> str:
    """Return the JSON of an event, in which NaN and infinities are null, as in `_encoded`."""
    try:
        return _ENCODER.encode(value)
    except ValueError:  # such as 1e999, in what a client or a model wrote
        if (made := Pieces(value)).n_values > FEW:
            raise _LongError from None
        return b"".join(made).decode()


class Pieces:
    """JSON whose long lists are made when it is iterated over; all else is encoded at once."""

    def __init__(self, *values: Any) -> None:
        self._parts = [part for value in values for part in _parts(value)]
        lists = [part for part in self._parts if isinstance(part, LazyList)]
        self.n_values = sum(part.n_values for part in lists)
        self._n_bytes = sum(part.n_bytes for part in lists)

    def __len__(self) -> int:
        """Return about the bytes that it takes until then."""
        encoded = (len(part) for part in self._parts if isinstance(part, bytes))
        return sum(encoded) + self._n_bytes

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
                continue
            start = b"["
            for item in part:
                yield start + _encoded(item)
                start = b","
            yield b"]" if start == b"," else b"[]"


Written = bytes | Pieces


def _encoded(value: Any) -> bytes:
    """Return the JSON of a value; JSON has no NaN and no infinity, which become null."""
    return to_json(value, inf_nan_mode="null")


def _parts(value: Any) -> Iterator[bytes | LazyList]:
    """Yield JSON and lists to be made; bytes are JSON already."""
    if isinstance(value, bytes | LazyList):
        yield value
    elif isinstance(value, Pieces):
        yield from value._parts
    elif isinstance(value, dict) and value:
        for place, (key, item) in enumerate(value.items()):
            yield (b"," if place else b"{") + _encoded(key) + b":"
            yield from _parts(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | LazyList):
        for place, item in enumerate(value):
            yield b"," if place else b"["
            yield from _parts(item)
        yield b"]"
    else:
        yield _encoded(value)


def whole(value: Any) -> Written:
    """Return the JSON of an answer: in pieces if much of it is to be made."""
    try:
        return _encoded(value)
    except PydanticSerializationError:  # of a lazy list; `Pieces` raises any other again
        return _short(Pieces(value))


def written(
    value: Any, encode: Callable[[Any], str] = compact, before: str = "", after: str = ""
) -> Written:
    """Return the JSON of a value, between two texts: in pieces if much of it is to be made."""
    try:
        return f"{before}{encode(value)}{after}".encode()
    except _LongError:
        return _short(Pieces(before.encode(), value, after.encode()))


def _short(made: Pieces) -> Written:
    return b"".join(made) if made.n_values <= FEW else made


def together(parts: list[Written]) -> Written:
    """Return several one after the other."""
    if all(isinstance(part, bytes) for part in parts):
        return b"".join(parts)  # type: ignore[arg-type]
    return Pieces(*parts)


async def sent(made: Written, worker: TextWorker) -> AsyncIterator[bytes]:
    """Yield bytes, or pieces that a thread makes and joins to larger ones."""
    if isinstance(made, bytes):
        if made:
            yield made
        return
    loop, pieces = asyncio.get_running_loop(), iter(made)
    while piece := await loop.run_in_executor(worker, _next, pieces):
        yield piece


def _next(pieces: Iterator[bytes]) -> bytes:
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= PIECE:
            break
    return bytes(joined)


def json_response(body: Written, worker: TextWorker) -> Response:
    """Return a response of JSON; a large one is sent in pieces, and streams can send in between.

    In one piece it would be copied whenever a part has been sent, which blocks the event loop.
    """
    if not isinstance(body, bytes):
        return StreamingResponse(sent(body, worker), media_type=_JSON)
    if len(body) <= PIECE:
        return Response(body, media_type=_JSON)
    headers = {"content-length": str(len(body))}
    return StreamingResponse(_slices(body), headers=headers, media_type=_JSON)


def held_response(body: Written, server: ServedModel | ModelRegistry) -> Response:
    """Return a response of JSON that counts among the answers until it is sent, if it is large."""

    async def made() -> Response:
        return json_response(body, server.text_worker)

    if len(body) <= PIECE:
        return json_response(body, server.text_worker)
    return Deferred(made, server.answers[False].hold(len(body)))


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]
        await asyncio.sleep(0)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnect if the client disconnects.

    Call it once the body has been read: then the server reports nothing but the disconnect.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)
        del working, disconnecting  # else an error holds the request until garbage is collected


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Deferred(Response):
    """A response that is made when it is sent: nothing holds the request's body any more.

    A client that disconnects before that cancels the work.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, Response]], held: AbstractContextManager[None]
    ) -> None:
        self._work, self._held = work, held
        self.background = None  # which FastAPI reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the response and send it, as an ASGI application does."""
        with self._held:
            response = await unless_disconnected(receive, self._work())
            await response(scope, receive, send)
