"""Statuses and errors of all routes, and the state of a request.

An error becomes a response in `error_response`, or in a stream's last event: nowhere else.
"""

from __future__ import annotations

import errno
import logging
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Query
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from kvasir.model.platform.files import in_words
from kvasir.server.errors import (
    EngineError,
    InsufficientStorageError,
    KvasirError,
    UnavailableError,
    UnknownFieldError,
)
from kvasir.server.requests.adapters.served import AdaptedModel
from kvasir.server.requests.completion import RequestState
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel

logger = logging.getLogger("kvasir")

T = TypeVar("T")

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
# Their errors have the form of TGI, which is TEI's, too.
TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"}) | {
    *("/embed", "/embed_all", "/similarity", "/rerank", "/predict"),
}
_ANTHROPIC_PATH = "/v1/messages"  # and the paths below it
_COMMON_PATH = "/v1/models"  # also of OpenAI's API, without Anthropic's header
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TGI_TYPES = {"invalid_request_error": "validation", "internal_error": "generation"}

STATUSES = {
    400: "The request is malformed, out of range, not supported, or too long for the model.",
    401: "No valid API key.",
    403: "Without keys: a web page of another origin, or a host name that is not allowed.",
    404: "There is no such model, or no such path.",
    405: "The path does not take this method.",
    409: "A batch reads the file, has ended already, or is one too many.",
    413: "The body is larger than `max_body_bytes`, or a file than the room in `batch_dir`.",
    429: "Too much waits or runs, the key has used its limit, or the deadline cannot be met.",
    431: "The URL and the headers, or the trailers of a chunked body, exceed 32 KiB.",
    500: "The engine failed.",
    503: "The server loads, shuts down, or lacks connections, memory or time for the request.",
    504: "The deadline passed before the first token, or came too near while the request waited.",
    507: "The server's disk is full.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route with these errors; `routes.document` adds their bodies."""
    return {status: {"description": STATUSES[status]} for status in (*statuses, 431, 500, 503)}


# The options of a route that needs no API key.
OPEN: dict[str, Any] = {"responses": errors(), "openapi_extra": {"security": []}}
READ_ERRORS = errors(401, 403, 429)
MODEL_ERRORS = errors(401, 403, 404, 429)
BODY_ERRORS = errors(400, 401, 403, 404, 413, 429)
GENERATE_ERRORS = errors(400, 401, 403, 404, 413, 429, 504)
# The `responses` of a route that can stream.
STREAMED = GENERATE_ERRORS | {
    200: {
        "description": "The answer. A stream is server-sent events.",
        "content": {"text/event-stream": {}},
    }
}

# The same of Ollama's routes.
STREAMED_LINES = GENERATE_ERRORS | {
    200: {
        "description": "The answer. A stream is lines of JSON.",
        "content": {"application/x-ndjson": {}},
    }
}


def models_of(scope: Scope) -> ModelRegistry:
    """Return the models of the application."""
    return cast("ModelRegistry", scope["app"].state.models)


def served_model(request: Request) -> ServedModel:
    """Return the model, or adapter, that `BodyRoute` or `named_model` has found.

    A request has one version of it to its end.
    """
    state = state_of(request.scope)
    if state.served is None:
        served = models_of(request.scope).named(state.adapter or state.model)
        if isinstance(served, AdaptedModel) and served.parent.name != state.model:
            message = f"the adapter {served.name!r} has become another model's; send it again"
            raise UnavailableError(message, retry_after=1)  # the request holds its model
        state.served = served
    return cast("ServedModel", state.served)


def note_model(scope: Scope, served: ServedModel) -> None:
    """Note the model that a request is for, and its adapter, if it names one."""
    state = state_of(scope)
    state.model, state.adapter, state.served = served.name, "", None
    if isinstance(served, AdaptedModel):
        state.model, state.adapter = served.parent.name, served.name


async def named_model(
    request: Request,
    model: Annotated[str | None, Query(description="A model's name. Default: the first.")] = None,
) -> ServedModel:
    """Return the model that a request without a body names."""
    served = models_of(request.scope).find(model)
    note_model(request.scope, served)
    return served


NamedModel = Annotated[ServedModel, Depends(named_model)]


def state_of(scope: Scope) -> RequestState:
    """Return the request's state, which `request_context` has set."""
    return cast("RequestState", scope["state"]["request"])


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(_LOWEST_LOGPROB, logprob)  # in this order NaN is replaced too


def path_of(scope: Scope) -> str:
    """Return the path without the part that a proxy takes off."""
    # `root_path` alone would include the path of a mount.
    root_path = scope.get("app_root_path", scope.get("root_path", ""))
    return str(scope.get("path", "")).removeprefix(root_path)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is of Anthropic's API."""
    path = f"{path_of(scope)}/"
    if path.startswith(f"{_COMMON_PATH}/"):
        return "anthropic-version" in Headers(scope=scope)
    return path.startswith(f"{_ANTHROPIC_PATH}/")


def is_ollama(scope: Scope) -> bool:
    """Return whether a request is of Ollama's API."""
    return path_of(scope).startswith("/api/")


def error_body(scope: Scope, error: Exception) -> tuple[KvasirError, dict[str, Any]]:
    """Return an error of our tree, and its body in the dialect of the path."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        logger.warning("request %s: %s", state_of(scope).id, in_words(error))
        error = InsufficientStorageError(
            "the server's disk is full; delete files, or try again when there is room"
        )
    if not isinstance(error, KvasirError):
        logger.error("request %s failed", state_of(scope).id, exc_info=error)
        error = EngineError("internal error")
    # For the log, which gets nothing that a client wrote: no unknown name, no key of an object.
    named = None if isinstance(error, UnknownFieldError) else error.param
    state_of(scope).error = error.reason
    state_of(scope).error_param = named and named.partition(".")[0]
    message = error.message
    if error.status == 500:
        message = f"{message}; request id {state_of(scope).id}"  # to be found in the log
    if is_ollama(scope):
        return error, {"error": message}
    if path_of(scope) in TGI_PATHS:
        return error, {"error": message, "error_type": _TGI_TYPES.get(error.type, error.type)}
    if is_anthropic(scope):
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        cause = {"type": kind, "message": message}
        return error, {"type": "error", "error": cause, "request_id": state_of(scope).id}
    fields = {"message": message, "type": error.type, "param": error.param, "code": error.code}
    return error, {"error": fields}


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """Return the response for an error of any kind, and count it."""
    refusal, body = error_body(scope, error)
    models_of(scope).metrics.rejected(refusal.reason, state_of(scope).model)
    return JSONResponse(body, refusal.status, refusal.headers)
