"""The parsing of a request's JSON: bounded in time, with errors of one line that name the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir.model.platform.suggestions import did_you_mean, nearest
from kvasir.server.api.http.keys import require_key
from kvasir.server.api.http.pieces import compact, unless_disconnected
from kvasir.server.api.http.responses import is_ollama, models_of, note_model, state_of
from kvasir.server.api.http.streams import EventStream
from kvasir.server.api.other_servers import NO_OPS, USED_HERE
from kvasir.server.api.schemas import RequestBody, field_names
from kvasir.server.errors import ContextLengthError, InvalidRequestError, UnknownFieldError
from kvasir.server.requests.admission.queue import context_length
from kvasir.server.requests.served_model import ServedModel, Task
from kvasir.server.requests.text_worker import SHORT

T = TypeVar("T")

_VERSIONS = ("/v1/", "/v2/")  # the paths of protocols whose bodies name a model


_MOST_TOKEN_IDS = 2**18
# A prompt has at most so many token ids, and a conversation so many messages and schemas. At any of
# these limits no step of the work on a body holds the interpreter's lock for 50 ms.
MOST_IN_BODY = (
    ("quotation marks around strings", (b'"',), 2**16),
    ("commas between values", (b",",), _MOST_TOKEN_IDS),
    ("objects and arrays", (b"{", b"["), 2**14),
    ("fractions, exponents and booleans", (b".", b"e", b"E"), 2**15),
)
_TOKEN_IDS = re.compile(rb"\[[-\d\s,]+\]")
_MOST_DIGITS = 400  # of a number: reading a whole one takes time by their square
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(i) in "0123456789" else 32 for i in range(256))
_LONG_NUMBER = b"0" * (_MOST_DIGITS + 1)


class BodyRoute(APIRoute):
    """A route whose body FastAPI documents, and `parse` parses for one-line errors.

    A path of a version, such as /v1, wants a model's name where several are served. Elsewhere the
    default is the first for the route's first task that a model is for.
    """

    tasks: tuple[Task, ...] = ()  # none: a route of every model
    loads = False  # a model of the folder before the endpoint is called

    def check(self, served: ServedModel) -> None:
        """Raise an error for a model that the route is not for, before it is loaded."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the request's model loaded until its response is sent."""
        async with state_of(scope).held:
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler. An endpoint with a body takes the request and the body."""
        kind = get_type_hints(self.endpoint, include_extras=True).get("body")
        if kind is None:
            return super().get_route_handler()
        adapter: TypeAdapter[Any] = TypeAdapter(kind)

        async def answer(request: Request, raw: bytes) -> Response:
            models = models_of(request.scope)
            ignored, state = set[str](), state_of(request.scope)
            longest = max(served.builder.max_model_len for served in models.served.values())
            work = partial(parse, adapter, raw, ignored, longest)
            body = await models.text_worker.call(len(raw), work)
            name = getattr(body, "model", None)
            must_choose = hasattr(body, "model") and self.path.startswith(_VERSIONS)
            served = models.find(name, *self.tasks, must_choose=must_choose)
            note_model(request.scope, served)
            self.check(served)
            state.ignored = tuple(sorted(ignored))
            models.metrics.ignored(state.ignored)
            is_wanted = self.loads and getattr(body, "wants_model", True)
            if is_wanted and state.model in models.loader.names:
                holding = models.loader.hold(state.model, getattr(body, "keep_alive", None))
                entering = state.held.enter_async_context(holding)
                if getattr(body, "stream", False) and not is_ollama(request.scope):
                    return EventStream.after(entering, partial(self.endpoint, request, body))
                await unless_disconnected(request.receive, entering)
            response: Response = await self.endpoint(request, body)
            return response

        async def handle(request: Request) -> Response:
            # `request.body()` would keep the bytes until the answer has ended.
            raw = await _body(request)
            state_of(request.scope).body_size = len(raw)
            work = answer(request, raw)
            return await (work if len(raw) <= SHORT else unless_disconnected(request.receive, work))

        return handle


async def _body(request: Request) -> bytes:
    """Return a request's body. Tiny pieces would take many times their size in a list."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
    return bytes(raw)


def _route_for(*tasks: Task) -> type[BodyRoute]:
    return type("TaskRoute", (BodyRoute,), {"tasks": tasks, "loads": True})


TextRoute = _route_for("generate")
VectorRoute = _route_for("embed")
LabelRoute = _route_for("classify")
EncoderRoute = _route_for("embed", "classify")
PairRoute = _route_for("classify", "embed")


class _AdminRoute(BodyRoute):
    """A route that one key alone opens; without it no body is read. key: the setting's name."""

    key: str

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler. It raises AuthenticationError without the key."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            key = getattr(models_of(request.scope).settings, self.key)
            require_key(request.scope, key, self.key)
            return await answer(request)

        return handle


def admin_route(key: str) -> type[BodyRoute]:
    """Return the class of routes that the key of a setting alone opens."""
    return type("AdminRoute", (_AdminRoute,), {"key": key})


def check_amount(raw: bytes, max_model_len: int = 0) -> None:
    """Raise InvalidRequestError for a JSON text that would take too long to parse.

    max_model_len: of the model with the longest; with it a list of too many token ids is a
    ContextLengthError, by which clients know that they have to shorten their prompt.
    """
    if not (_excess(raw, *MOST_IN_BODY) or _has_long_number(raw)):
        return
    # Count again outside strings. Without escapes, every quotation mark begins or ends a string.
    marks = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    excess = _excess(marks, MOST_IN_BODY[0])
    if not excess:
        outside = b"".join(marks.split(b'"')[::2])
        excess = _excess(outside, *MOST_IN_BODY[1:])
        ids = max(_TOKEN_IDS.findall(outside), key=len, default=b"") if excess else b""
        if (n_ids := ids.count(b",") + 1) > _MOST_TOKEN_IDS > max_model_len > 0:
            raise ContextLengthError(
                f"{context_length(max_model_len)} the body has a list of {n_ids} token ids; "
                "shorten it"
            )
        if _has_long_number(outside):
            excess = f"a number of more than {_MOST_DIGITS} digits"
    if excess:
        raise InvalidRequestError(f"the body has {excess}; send less at once")


def _has_long_number(text: bytes) -> bool:
    return _LONG_NUMBER in text.translate(_DIGITS_AS_ZEROS)


def _excess(text: bytes, *limits: tuple[str, tuple[bytes, ...], int]) -> str | None:
    """Return in words the first of the limits that a text exceeds."""
    counts = ((sum(map(text.count, marks)), name, most) for name, marks, most in limits)
    return next((f"{n} {name}, more than {most}" for n, name, most in counts if n > most), None)


def parse(
    adapter: TypeAdapter[T],
    raw: bytes,
    ignored: set[str] | None = None,
    max_model_len: int = 0,
) -> T:
    """Return a body from its JSON; `ignored` gets the names of hints without effect.

    Raises InvalidRequestError naming the first wrong field, and as `check_amount`.
    """
    try:
        check_amount(raw, max_model_len)
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    try:
        return adapter.validate_python(value, context=ignored)
    except ValidationError as error:
        first = _clearest(error.errors(include_url=False))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "too_long":  # pydantic counts the entries of a list only
        n_entries, limit = len(first["input"]), first["ctx"]["max_length"]
        message = f"{n_entries} entries are too many: at most {limit} may be given"
    is_missing = first["type"] == "missing"
    place = ".".join(map(str, _path(first["loc"], value, is_missing=is_missing)))
    kind = InvalidRequestError
    if first["type"] == "extra_forbidden":
        kind = UnknownFieldError
        mend = f"use {USED_HERE[place]}" if place in USED_HERE else _advice(adapter, first["loc"])
        message = f"the field {place!r} is unknown or not supported; {mend}"
        if (name := str(first["loc"][-1])) in NO_OPS:
            values = " or ".join(map(compact, NO_OPS[name]))
            message = f"{place}: nothing but {values} is served here; {mend}"
    elif place:
        message = f"{place}: {message}"
    raise kind(message, param=place or None)


def _clearest(errors: list[ErrorDetails]) -> ErrorDetails:
    """Return the first error, or that of a typo of the field which the first one misses."""
    first = errors[0]
    if first["type"] != "missing":
        return first
    *parent, name = first["loc"]
    typos = (
        error
        for error in errors
        if error["type"] == "extra_forbidden"
        and [*error["loc"][:-1]] == parent
        and nearest(str(error["loc"][-1]), [str(name)])
    )
    return next(typos, first)


def _advice(adapter: TypeAdapter[Any], loc: tuple[int | str, ...]) -> str:
    """Return what to do about an unknown field: the nearest known one, or to leave it out."""
    schema: Any = adapter.core_schema
    while "cls" not in schema and "schema" in schema:
        schema = schema["schema"]
    kind = schema.get("cls", RequestBody)
    is_nested = len(loc) > 1 or not issubclass(kind, RequestBody)
    names = _nested_names() if is_nested else field_names(kind)
    name = str(loc[-1])
    return did_you_mean(name, names - {name}, "leave it out")


@cache
def _nested_names() -> frozenset[str]:
    """Return the fields of every object in a request."""
    kinds = [RequestBody]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return frozenset().union(*map(field_names, kinds))


def _path(parts: tuple[int | str, ...], value: Any, *, is_missing: bool) -> Iterator[int | str]:
    """Yield an error's location without the names that unions and validators add."""
    for depth, part in enumerate(parts, 1):
        if isinstance(value, dict):
            is_in_body = part in value
        else:
            is_in_body = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_in_body:
            value = value[part]
        if is_in_body or (is_missing and depth == len(parts)):
            yield part
