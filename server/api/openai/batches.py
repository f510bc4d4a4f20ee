"""OpenAI's batches, and how a line of one is answered: by the route that a client would call."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Path, Query, Request
from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic_core import from_json
from starlette.types import Message

from kvasir.server.api.http.body import check_amount, parse
from kvasir.server.api.http.keys import ApiKeys
from kvasir.server.api.http.middleware import new_state
from kvasir.server.api.http.pieces import compact
from kvasir.server.api.http.responses import error_body, models_of
from kvasir.server.api.openai.files import CHANGE_ERRORS, ERRORS, After, Owner, Store, page
from kvasir.server.api.schemas import Page, RequestBody, at_most
from kvasir.server.batches.journal import Reply
from kvasir.server.batches.objects import Batch
from kvasir.server.batches.worker import BatchWorker
from kvasir.server.errors import ConflictError, InvalidRequestError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.text_worker import SHORT

_KEY_RETRY = 60.0  # seconds until the name of a batch may have a key again
_FAILED_RETRY = 60.0  # seconds, once an engine has failed and a restart is needed
_LONG = 2**20  # bytes of an answer of which nothing but the usage is needed
_MAX_METADATA = 16  # entries
_CANCELLABLE = ("validating", "in_progress", "cancelling")


router = APIRouter()

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_Metadata = Annotated[
    dict[_Key, _Value],
    Field(max_length=_MAX_METADATA),
    BeforeValidator(at_most(_MAX_METADATA), json_schema_input_type=dict[_Key, _Value]),
]
BatchId = Annotated[str, Path(json_schema_extra={"minLength": 1})]


class BatchBody(RequestBody):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(description="The id of a file with a request in each line.")
    endpoint: str = Field(description="The path of all requests, such as `/v1/chat/completions`.")
    completion_window: Literal["24h"] = Field(description="What is not answered then, expires.")
    metadata: _Metadata | None = Field(None, description="Kept with the batch.")


class BatchList(Page[Batch]):
    """A page of batches, the newest first."""


_SCHEMA = {"$ref": f"#/components/schemas/{BatchBody.__name__}"}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
_PARSER = TypeAdapter(BatchBody)


@router.post("/v1/batches", responses=CHANGE_ERRORS, openapi_extra=_BODY)
async def create(request: Request, store: Store, owner: Owner) -> Batch:
    """Answer the requests of a file, in the background."""
    worker: BatchWorker = request.app.state.batches
    raw = await request.body()
    text_worker = models_of(request.scope).text_worker
    body = await text_worker.call(len(raw), partial(parse, _PARSER, raw))
    endpoints = request.app.state.endpoints
    if body.endpoint not in endpoints:
        message = f"endpoint: it must be one of {', '.join(endpoints)}, not {body.endpoint!r}"
        raise InvalidRequestError(message, param="endpoint")
    file = store.file(body.input_file_id, owner)
    if file.purpose != "batch":
        message = f"input_file_id: the file's purpose is {file.purpose}, not batch"
        raise InvalidRequestError(message, param="input_file_id")
    return await worker.create(file, body.endpoint, body.metadata)


@router.get("/v1/batches", responses=ERRORS)
async def batches(
    store: Store, owner: Owner, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> BatchList:
    """List the batches of this key."""
    mine = [item for item in store.batches.values() if item.owner == owner]
    return BatchList.model_construct(**page(mine[::-1], after, limit))


@router.get("/v1/batches/{batch_id}", responses=ERRORS)
async def batch(batch_id: BatchId, store: Store, owner: Owner) -> Batch:
    """Return a batch, with the number of its requests that are answered."""
    return store.batch(batch_id, owner)


@router.post("/v1/batches/{batch_id}/cancel", responses=CHANGE_ERRORS)
async def cancel(request: Request, batch_id: BatchId, store: Store, owner: Owner) -> Batch:
    """End a batch; answers that it has stay."""
    worker: BatchWorker = request.app.state.batches
    asked = store.batch(batch_id, owner)
    if asked.status not in _CANCELLABLE:
        raise ConflictError(f"the batch is {asked.status} and cannot be cancelled")
    await worker.cancel(asked)
    return asked


def parse_line(raw: bytes) -> Any:
    """Return what a line of JSON holds. Raises ValueError, or InvalidRequestError for too much."""
    check_amount(raw)
    return from_json(raw, allow_inf_nan=False)


class Answers:
    """The answers of an application's routes to requests without a connection.

    keys: None is a server without keys. Those of one name have, beside the tokens of a minute that
    its clients may use, as many for its batches.
    """

    def __init__(self, app: FastAPI, keys: ApiKeys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, path: str, body: bytes, owner: str) -> Reply | float:
        """Answer a request of a key's name, or return the seconds after which to try again."""
        state = new_state(None)
        state.is_background = True
        if self._keys is not None:
            key = self._keys.named(owner)
            if key is None:
                return _KEY_RETRY
            limit = key.tokens_per_minute
            account = b"batches of " + key.account
            state.caller = Caller(owner, key.salt, None, limit, key.state, account)
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "app": self._app,
            "state": {"request": state},
        }
        sent: list[Message] = []
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in given:
                return message
            await asyncio.Event().wait()  # nobody disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await self._app.router(scope, receive, send)
        except Exception as error:
            known_error, content = error_body(scope, error)
            if known_error.retry_after is not None:
                return float(known_error.retry_after)
            if any(served.engine.failed for served in self._app.state.models.served.values()):
                return _FAILED_RETRY
            return Reply(known_error.status, state.id, compact(content).encode(), content)
        answer = b"".join(message.get("body", b"") for message in sent)
        if len(answer) > _LONG and state.completion is not None:  # parsing it would stop streams
            n_prompt, n_new = state.completion.n_prompt_tokens, state.completion.n_completion_tokens
            cached = {"cached_tokens": state.completion.n_cached_tokens}
            usage = {"input_tokens": n_prompt, "output_tokens": n_new}
            content = {"usage": usage | {"input_tokens_details": cached}}
        else:
            work = asyncio.to_thread(from_json, answer) if len(answer) > SHORT else None
            content = from_json(answer) if work is None else await work
        return Reply(sent[0]["status"], state.id, answer, content)
