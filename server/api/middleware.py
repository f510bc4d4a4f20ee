"""Around every request: its id, its line in the log, errors as answers; the key; the limit on the body.

From the outside in: RequestContext, CORS where it is wanted, ErrorAnswers, KeyCheck, BodyLimit. A browser shows a page
only what CORS's headers allow, errors too, so those are answered inside; a preflight request brings no key.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.keys import ApiKeys
from server.api.responses import error_response
from server.errors import (
    AuthenticationError,
    EngineError,
    KvasirError,
    OverloadedError,
    RequestTooLargeError,
)
from server.requests.completion import Completion

logger = logging.getLogger("kvasir")

_PROBED_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/health/startup", "/metrics", "/metrics/router"}
)
_OPEN_PATHS = _PROBED_PATHS | {"/"}
_OPEN_FOLDER = "/static/"
_READING = frozenset({"GET", "HEAD"})
_CLIENT_LEFT = 499  # nginx's status for the log: no answer was sent


class RequestContext:
    """Sets `request_id` and `arrived` in the scope's state, where routes leave their `completion`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(Headers(scope=scope).get("x-request-id"))
        state["arrived"] = perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = _CLIENT_LEFT
        finally:
            log_request(scope, status, perf_counter() - state["arrived"])


class ErrorAnswers:
    """What is raised before an answer has begun becomes the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except ClientDisconnect:
            raise
        except Exception as error:
            if (
                has_begun or scope["type"] != "http"
            ):  # too late to answer: the server cuts the connection
                raise
            if not isinstance(error, KvasirError):
                logger.exception("request %s failed", scope["state"]["request_id"])
                error = EngineError("internal error")
            await error_response(scope, error)(scope, receive, send)


class KeyCheck:
    """401 without one of the keys, but for health, metrics and the front page; with no keys, everything is open.

    most: requests that one key may have in flight; None is any number. One more is a 429.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, most: int | None) -> None:
        self.app = app
        self.keys = keys
        self.most = most
        self._in_flight = Counter[bytes]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.keys.is_open or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = (
            await self.keys.find(given.strip(" \t").encode("latin-1"))
            if scheme.lower() == "bearer"
            else None
        )
        if key is None:
            raise AuthenticationError("no valid API key; send one as: Authorization: Bearer KEY")
        with self._place(key, scope):
            await self.app(scope, receive, send)

    @contextmanager
    def _place(self, key: bytes, scope: Scope) -> Iterator[None]:
        """Hold one of the key's places for as long as its request lasts. Raises OverloadedError."""
        if self.most is not None and self._in_flight[key] >= self.most:
            service = scope["app"].state.service
            raise OverloadedError(
                f"{self.most} requests with this API key are in flight, which is its limit; wait for one to end",
                retry_after=service.admission.retry_after(1, service.engine.snapshot()),
                limit="key",
            )
        self._in_flight[key] += 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    def _is_open(self, scope: Scope) -> bool:
        path = _path(scope)
        return scope["method"] in _READING and (
            path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        )


class BodyLimit:
    """413 as soon as a body is known to be larger than `max_bytes`: announced, or counted while it comes in."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        self._check(int(announced) if announced.isdecimal() else 0)
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check(received)
            return message

        await self.app(scope, counting, send)

    def _check(self, n_bytes: int) -> None:
        if n_bytes > self.max_bytes:
            raise RequestTooLargeError(
                f"the body has more than {self.max_bytes} bytes, which is the limit"
            )


def request_id(given: str | None) -> str:
    """The caller's, if it is printable ASCII of at most 128 characters; otherwise a new one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid4().hex


def _path(scope: Scope) -> str:
    """Without what a proxy takes off."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """One line for each request. What was asked and answered stays out of it.

    Probes and scrapes that went well are for debugging only: they come many times a second, and say nothing new.
    """
    state = scope["state"]
    fields: dict[str, Any] = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "route": scope["path"],
    }
    fields |= {"status": status, "duration_ms": round(seconds * 1000, 3)}
    completion: Completion | None = state.get("completion")
    if completion is not None:
        first = completion.seconds_to_first_token
        fields["prompt_tokens"] = completion.n_prompt_tokens
        fields["completion_tokens"] = completion.n_completion_tokens
        fields["finish_reason"] = [choice.finish_reason for choice in completion.choices]
        fields["ttft_ms"] = None if first is None else round(first * 1000, 3)
    is_routine = _path(scope) in _PROBED_PATHS and 200 <= status < 400
    logger.log(logging.DEBUG if is_routine else logging.INFO, "request", extra={"fields": fields})
