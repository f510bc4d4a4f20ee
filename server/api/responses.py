"""What every route answers with: error bodies in the caller's dialect, and nothing at all when the caller has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope

from server.errors import KvasirError
from server.requests.service import Service

T = TypeVar("T")

_PIECE = 2**16  # uvicorn's limit on what waits to be sent
_TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})
_TGI_TYPES = {"invalid_request_error": "validation", "internal_error": "generation"}


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def error_body(scope: Scope, error: KvasirError) -> dict[str, Any]:
    """OpenAI's body, or TGI's on TGI's routes. A failure of ours carries the request id, for whoever reads the log."""
    message = error.message
    if error.status == 500:
        message = f"{message}; request id {scope['state']['request_id']}"
    root_path = scope.get(
        "app_root_path", scope.get("root_path", "")
    )  # the first of these where a mount is inside
    if scope["path"].removeprefix(root_path) in _TGI_PATHS:
        return {"error": message, "error_type": _TGI_TYPES.get(error.type, error.type)}
    return {
        "error": {"message": message, "type": error.type, "param": error.param, "code": error.code}
    }


def error_response(scope: Scope, error: KvasirError) -> JSONResponse:
    scope["app"].state.service.metrics.rejected(error.reason)
    return JSONResponse(error_body(scope, error), error.status, error.headers)


def json_response(body: bytes) -> Response:
    """A large one goes in pieces, so that streams can send in between.

    As one it would be copied whenever a part of it has been sent, and hold the event loop for as long.
    """
    if len(body) <= _PIECE:
        return Response(body, media_type="application/json")
    headers = {"content-length": str(len(body))}
    return StreamingResponse(_pieces(body), headers=headers, media_type="application/json")


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]
        await asyncio.sleep(0)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientDisconnect raised, when the client leaves first.

    Call it when the body has been read: from then on the server reports nothing but the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
