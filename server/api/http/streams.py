"""Answers to completions: whole, or as server-sent events, in a protocol's form."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir.server.api.http.pieces import (
    Deferred,
    Written,
    compact,
    json_response,
    sent,
    together,
    unless_disconnected,
    whole,
)
from kvasir.server.api.http.responses import error_body, state_of
from kvasir.server.requests.completion import Completion, Delta, RequestState
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0  # of silence, after which a stream gets a comment line
LOADING = b": loading\n\n"
LOADING_SECONDS = 1.0  # until such a comment: errors have a status of their own before


class Formatter(ABC):
    """The form of a completion's response: a stream shows the parts of which `whole` is made."""

    media_type = "text/event-stream"
    end = b""  # the last event of a stream
    keep_alive = KEEP_ALIVE
    completion: Completion  # once the request is admitted

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.tokenizer = served.model_dir.tokenizer

    @abstractmethod
    def parts(self, delta: Delta) -> Iterator[Any]:
        """Yield what a delta adds, if it has anything to show."""

    @abstractmethod
    def event(self, part: Any) -> Written:
        """Return the event of a part."""

    def chunk(self, delta: Delta) -> Written:
        """Return the events for a delta."""
        return together([self.event(part) for part in self.parts(delta)])

    def keep(self, part: Any) -> None:  # noqa: B027  (most forms keep what `parts` yields)
        """Add a part to the whole, if `parts` has not done so."""

    def add(self, delta: Delta) -> None:
        """Keep the content of a delta."""
        for part in self.parts(delta):
            self.keep(part)

    async def finish(self) -> None:  # noqa: B027  (most forms store nothing)
        """Store what is to be there once the client has seen the end."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the body of a finished completion."""

    def tail(self) -> Written:
        """Return the events after all deltas."""
        return self.end

    def failed(self, fields: dict[str, Any]) -> bytes:
        """Return the last events of a stream that an error has ended, given the error's body.

        The event of the error is named if that body has a type.
        """
        return event(compact(fields), fields.get("type")) + self.end


def respond(
    request: Request, wanted: CompletionRequest, formatter: Formatter, *, stream: bool
) -> Response:
    """Return the response to a request, whole or as a stream, which runs when it is sent."""
    state = state_of(request.scope)
    held = formatter.served.answers[state.is_background].hold(wanted.answer_bytes)
    if stream:
        events = _events(state, wanted, formatter)
        return EventStream(events, formatter.failed, held, formatter.media_type)
    return Deferred(partial(_whole, state, wanted, formatter), held)


async def _events(
    state: RequestState, wanted: CompletionRequest, formatter: Formatter
) -> AsyncGenerator[bytes, None]:
    served, sent_at = formatter.served, perf_counter()
    async with served.complete(wanted) as completion:
        state.completion = formatter.completion = completion
        async for deltas in completion.deltas(KEEP_ALIVE_SECONDS):
            chunk = together([formatter.chunk(delta) for delta in deltas])
            # New tokens may show nothing for long: those of a call that is passed on when complete.
            is_silent = not deltas or perf_counter() - sent_at >= KEEP_ALIVE_SECONDS
            if not isinstance(chunk, bytes):
                async for piece in sent(chunk, served.text_worker):
                    yield piece
            elif chunk or is_silent:
                yield chunk or formatter.keep_alive
            else:
                continue
            sent_at = perf_counter()
        await formatter.finish()
        async for piece in sent(formatter.tail(), served.text_worker):
            yield piece


async def _whole(state: RequestState, wanted: CompletionRequest, formatter: Formatter) -> Response:
    async with formatter.served.complete(wanted) as completion:
        state.completion = formatter.completion = completion
        async for deltas in completion.deltas():
            for delta in deltas:
                formatter.add(delta)
        await formatter.finish()
    return json_response(whole(formatter.whole()), formatter.served.text_worker)


def event(data: str, name: str | None = None) -> bytes:
    """Return a server-sent event with one line of data: JSON, which holds no line break."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()


class EventStream(Response):
    """A stream of events, as a rule server-sent ones, which closes `events` in any case.

    The response starts with the first event, so an error before it has a status of its own. A later
    error ends it with the events that `failed` returns for the error's body. A client that
    disconnects, waiting or reading, cancels the stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[dict[str, Any]], bytes],
        held: AbstractContextManager[None],
        media_type: str = Formatter.media_type,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._events, self._failed, self._held = events, failed, held

    @classmethod
    def after(
        cls, loading: Coroutine[Any, Any, object], make: Callable[[], Awaitable[Response]]
    ) -> EventStream:
        """Return the stream that `make` returns once a model is loaded, and comments before it.

        An error after the first comment is an event.
        """

        async def events() -> AsyncGenerator[bytes, None]:
            task, seconds = asyncio.ensure_future(loading), LOADING_SECONDS
            try:
                while not (await asyncio.wait([task], timeout=seconds))[0]:
                    yield LOADING
                    seconds = KEEP_ALIVE_SECONDS
                await task
            finally:
                task.cancel()
            made = await make()
            assert isinstance(made, cls)
            stream._failed = made._failed
            with made._held:
                async with aclosing(made._events) as events_after:
                    async for event_after in events_after:
                        yield event_after

        def failed(fields: dict[str, Any]) -> bytes:
            return event(compact(fields), fields.get("type"))

        stream = cls(events(), failed, nullcontext())
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI application does."""
        with self._held:
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
            except Exception as error:
                body = self._failed(error_body(scope, error)[1])
            await send({"type": "http.response.body", "body": body, "more_body": False})
