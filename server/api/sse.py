"""Server-sent events, as OpenAI's and TGI's clients read them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.responses import error_body, unless_disconnected
from server.errors import EngineError, KvasirError

logger = logging.getLogger("kvasir")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


compact = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def event(data: str) -> bytes:
    """One event with one line of data: JSON text, which holds no line break."""
    return f"data: {data}\n\n".encode()


def tight_event(data: str) -> bytes:
    """The same without the space, as TGI writes it; some of its clients cut off five characters."""
    return f"data:{data}\n\n".encode()


class EventStream(Response):
    """Sends what `events` yields, and closes it whatever happens.

    The response starts with the first event, so an error before it is an answer with a status of its own. A later one
    is an event `{"error": ...}`, followed by `last_words`. A client that leaves, waiting or reading, cancels it all.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, last_words: bytes = b"") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            except KvasirError as error:
                body = self._farewell(scope, error)
            except Exception:
                logger.exception("a stream failed")
                body = self._farewell(scope, EngineError("internal error"))
            await send({"type": "http.response.body", "body": body, "more_body": False})

    def _farewell(self, scope: Scope, error: KvasirError) -> bytes:
        return event(compact(error_body(scope, error))) + self._last_words
