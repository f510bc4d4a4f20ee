"""Around every request: its id, its line in the log, errors, who may ask, the limit on the body.

From the outside in: request_context, tracing if wanted, CORS if wanted, error_responses, key_check
(without keys page_check), body_limit. A browser shows a page only what CORS's headers allow, even
of errors, so those are answered inside; a preflight request has no key.
"""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Container
from ipaddress import ip_address
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.server.api.http.keys import ApiKeys
from kvasir.server.api.http.responses import (
    error_response,
    is_anthropic,
    models_of,
    path_of,
    state_of,
)
from kvasir.server.api.http.upload import FORM_BYTES, MAX_FILE_BYTES
from kvasir.server.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    RequestTooLargeError,
)
from kvasir.server.requests.completion import RequestState
from kvasir.server.settings import Settings

logger = logging.getLogger("kvasir")

HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/health/startup")
UPLOAD_PATH = "/v1/files"  # whose bodies go to disk as they arrive
# With a key of their own alone.
LOADING_PATHS = frozenset({"/v1/models/load", "/v1/models/unload"})
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}) | LOADING_PATHS
PROBED_PATHS = frozenset((*HEALTH_PATHS, "/metrics", "/metrics/router"))
_LENGTH_DIGITS = 20  # of 2**64, beyond which HTTP's parser refuses
_CLIENT_DISCONNECTED = 499  # nginx's status for the log: no response was sent


def request_context(app: ASGIApp) -> ASGIApp:
    """Set the RequestState in each scope's state, and log each request."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        state = new_state(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request"] = state
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state.id
                if state.ignored:
                    headers["x-kvasir-ignored"] = ", ".join(state.ignored)
                if state.scored_by is not None and status == 200:
                    headers["x-kvasir-scores"] = state.scored_by
                if is_anthropic(scope):
                    headers["request-id"] = state.id
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = _CLIENT_DISCONNECTED
        except CancelledError:  # the shutdown has cut the client off
            status = _CLIENT_DISCONNECTED
            raise
        finally:
            log_request(scope, status, perf_counter() - state.arrived)

    return run


def error_responses(app: ASGIApp) -> ASGIApp:
    """Turn what is raised before a response has begun into the response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, send_and_note)
        except ClientDisconnect:
            raise
        except Exception as error:
            # Once a response has begun, the server can only cut the connection.
            if has_begun or scope["type"] != "http":
                raise
            await error_response(scope, error)(scope, receive, send)

    return run


def key_check(app: ASGIApp, keys: ApiKeys) -> ASGIApp:
    """Answer 401 without a known key, except to health, metrics, the page and ADMIN_PATHS.

    A key that has as many requests in flight as it may gets a 429 for one more.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _reads_probe(scope) or _reads_page(scope)
        if is_open or (scope["method"] == "POST" and path_of(scope) in ADMIN_PATHS):
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        caller = await keys.find(given.strip(" \t").encode("latin-1"))
        if caller is None:
            raise AuthenticationError(
                "no valid API key; send one as: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        state_of(scope).caller = caller
        models = models_of(scope)
        models.metrics.asked(caller.name)
        async with caller.request(models.retry_after):
            await app(scope, receive, send)

    return run


def page_check(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Answer 403 to web pages of other origins, and under names that others could point here.

    For a server without keys, which a page could otherwise use through its reader's browser, and
    by DNS rebinding even read from. Health and metrics answer under any name.
    """
    names = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts or ())}
    origins = settings.cors_origins or ()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _reads_probe(scope):
            headers = Headers(scope=scope)
            _check_host(headers.get("host", ""), names)
            if "*" not in origins and not _reads_page(scope):
                _check_origin(headers, origins)
        await app(scope, receive, send)

    return run


def _check_host(host: str, names: set[str]) -> None:
    """Raise ForbiddenError for a name that is not allowed. DNS cannot rebind an IP address."""
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    if not name:  # HTTP/1.0, no browser
        return
    if any(name == each or (each.startswith("*") and name.endswith(each[1:])) for each in names):
        return
    try:
        ip_address(name)
    except ValueError:
        raise ForbiddenError(
            f"without API keys the server does not answer as {host[:100]!r}; name it in the "
            "setting allowed_hosts, or set api_key_file"
        ) from None


def _check_origin(headers: Headers, origins: Container[str]) -> None:
    """Raise ForbiddenError for another origin's page, which the browser's headers tell."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_own = site in ("same-origin", "none")
    if site is None:  # old browsers, and those that do not trust the connection
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
    if not is_own and origin not in origins:
        shown = "another site" if origin is None else repr(origin[:100])
        raise ForbiddenError(
            f"without API keys the server does not answer pages of {shown}; name their origin in "
            "the setting cors_origins, or set api_key_file"
        )


def _reads_probe(scope: Scope) -> bool:
    return path_of(scope) in PROBED_PATHS and scope.get("method") in ("GET", "HEAD")


def _reads_page(scope: Scope) -> bool:
    path = path_of(scope)
    is_page = path in ("/", "/docs") or path.startswith("/static/")
    return is_page and scope.get("method") in ("GET", "HEAD")


def body_limit(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Answer 413 once a body is known to exceed its limit: when announced, or as it arrives.

    Answer 400 to an encoding that is not known, and to a length that is no plain number.
    """

    def check(n_bytes: int, most: int) -> None:
        if n_bytes > most:
            raise RequestTooLargeError(f"the body has more than {most} bytes, the limit")

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        most: int = settings.max_body_bytes
        if settings.batch_dir is not None and path_of(scope) == UPLOAD_PATH:
            most = MAX_FILE_BYTES + FORM_BYTES
        n_received = 0

        async def receive_and_count() -> Message:
            nonlocal n_received
            message = await receive()
            n_received += len(message.get("body", b""))
            check(n_received, most)
            return message

        if scope["type"] == "http":
            headers = Headers(scope=scope)
            encoding = ", ".join(headers.getlist("transfer-encoding")).strip()
            if encoding.lower() not in ("", "chunked"):
                cause = f"transfer-encoding {encoding!r} is not supported"
                raise InvalidRequestError(f"{cause}; use chunked alone")
            announced = headers.get("content-length", "0").strip()
            if len(announced) > _LENGTH_DIGITS:
                cause = f"content-length has {len(announced)} digits"
                raise InvalidRequestError(f"{cause}; send it without leading zeros")
            check(int(announced) if announced.isdecimal() else 0, most)
        await app(scope, receive_and_count, send)

    return run


def new_state(given_id: str | None) -> RequestState:
    """Return a new request's state; its given id holds if it is at most 128 printable ASCII."""
    is_fit = given_id and len(given_id) <= 128 and given_id.isascii() and given_id.isprintable()
    return RequestState(given_id if given_id and is_fit else uuid4().hex, perf_counter())


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log a line for a request, without its content.

    Probes that succeed, or that wait for startup, and the page's files are for debugging only.
    """
    state = state_of(scope)
    fields: dict[str, Any] = {
        "request_id": state.id,
        "method": scope["method"],
        "route": scope["path"],
        "status": status,
        "duration_ms": round(seconds * 1000, 3),
    }
    known = {
        "model": state.model if len(models_of(scope).names) > 1 else "",
        "adapter": state.adapter,
        "key": state.caller.name,
        "trace_id": state.trace_id,
        "error": state.error,
        "param": state.error_param,
        "prompt_tokens": state.n_embedded,
    }
    fields |= {name: value for name, value in known.items() if value not in ("", None)}
    if (completion := state.completion) is not None:
        first = completion.seconds_to_first_token
        fields |= {
            "prompt_tokens": completion.n_prompt_tokens,
            "completion_tokens": completion.n_completion_tokens,
            "finish_reason": [choice.finish_reason for choice in completion.choices],
            "ttft_ms": None if first is None else round(first * 1000, 3),
        }
    path = path_of(scope)
    is_expected = 200 <= status < 400 or path == "/health/startup"
    is_routine = is_expected and (path in PROBED_PATHS or path.startswith("/static/"))
    logger.log(logging.DEBUG if is_routine else logging.INFO, "request", extra={"fields": fields})
