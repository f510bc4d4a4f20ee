"""OpenAI's Responses: POST /v1/responses, and the routes of the responses that are kept."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvasir.server.api.http.body import TextRoute
from kvasir.server.api.http.pieces import compact, held_response
from kvasir.server.api.http.responses import STREAMED, errors, models_of, served_model, state_of
from kvasir.server.api.http.streams import respond
from kvasir.server.api.openai.chat import prepare
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.formatting import JSON
from kvasir.server.api.openai.responses.answers import DeletedResponse, InputItems, ModelResponse
from kvasir.server.api.openai.responses.formatting import ResponseFormatter
from kvasir.server.api.openai.responses.items import PREFIXES
from kvasir.server.api.openai.responses.schemas import ResponsesBody
from kvasir.server.api.openai.responses.store import ResponseStore, conversation
from kvasir.server.api.structured import naming
from kvasir.server.errors import InvalidRequestError
from kvasir.server.state.state import Key

router = APIRouter(route_class=TextRoute)

_ERRORS = errors(400, 401, 403, 404, 429)


@router.post("/v1/responses", response_model=ModelResponse, responses=STREAMED)
async def create_response(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation of items, as OpenAI's Responses API does."""
    served, store = served_model(request), _store(request)
    if state_of(request.scope).is_background and "store" not in body.model_fields_set:
        body = body.model_copy(update={"store": False})  # a batch would drop what clients follow up
    if body.store:
        store.check()
    chat, items = await _chat(request, body)
    try:
        wanted, form = await prepare(request, chat)
    except InvalidRequestError as error:
        if error.param != "messages":
            raise
        raise type(error)(error.message.removeprefix("messages: "), param="input") from None
    wanted = naming(replace(wanted, length_param="max_output_tokens"), "text.format")
    key = _key(request, f"resp_{secrets.token_hex(16)}")
    formatter = ResponseFormatter(served, body, wanted, form, key)
    if body.store:
        formatter.store, formatter.items = store, items
    if body.stream:
        await store.state.announce(key, formatter)
    return respond(request, wanted, formatter, stream=body.stream)


async def _chat(request: Request, body: ResponsesBody) -> tuple[ChatBody, bytes]:
    """Return the chat that a body stands for, and its items as JSON if they are to be kept."""
    store, state = _store(request), state_of(request.scope)
    owner, given = state.caller.salt, body.items
    earlier = body.previous_response_id
    previous = await store.get((owner, earlier), "previous_response_id") if earlier else None
    references = [item["id"] for item in given if item["type"] == "item_reference"]
    stored = await store.of_items(owner, references)
    state.body_size += previous.n_read if previous else 0
    state.body_size += sum(len(response.output) for response in stored.values())
    if state.body_size > (most := served_model(request).settings.max_body_bytes):
        raise InvalidRequestError(
            f"the conversation has {state.body_size} bytes with the earlier responses, more than "
            f"the {most} of max_body_bytes; leave earlier ones out",
            param="previous_response_id" if earlier else "input",
        )

    def work() -> tuple[ChatBody, bytes]:
        outputs = (json.loads(response.output) for response in stored.values())
        referenced = {item["id"]: item for output in outputs for item in output}
        if lost := [item_id for item_id in references if item_id not in referenced]:
            raise store.missing(lost[0], "input")
        items = conversation(previous) if previous else []
        for item in given:
            is_reference = item["type"] == "item_reference"
            items.append(referenced[item["id"]] if is_reference else item)
        return body.chat(items), compact(items).encode() if body.store else b""

    return await served_model(request).text_worker.call(state.body_size, work)


@router.get("/v1/responses/{response_id}", response_model=ModelResponse, responses=_ERRORS)
async def response(
    request: Request,
    response_id: str,
    stream: Annotated[bool, Query(description="Must be false.")] = False,
) -> Response:
    """Return a response that is kept, or that is being streamed."""
    if stream:
        raise InvalidRequestError("a response is not streamed again; leave stream out")
    shown = await _store(request).shown("get", _key(request, response_id))
    return held_response(shown, models_of(request.scope))


@router.post("/v1/responses/{response_id}/cancel", response_model=ModelResponse, responses=_ERRORS)
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that is being streamed. One that has ended is returned as it is."""
    shown = await _store(request).shown("cancel", _key(request, response_id))
    return held_response(shown, models_of(request.scope))


@router.delete("/v1/responses/{response_id}", responses=_ERRORS)
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forget a response."""
    await _store(request).pop(_key(request, response_id))
    return DeletedResponse(id=response_id)


@router.get("/v1/responses/{response_id}/input_items", responses=_ERRORS)
async def input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="The last item before the page.")] = None,
) -> InputItems:
    """List the conversation before a response that is kept."""
    raw = (await _store(request).get(_key(request, response_id))).items
    worker = models_of(request.scope).text_worker
    stored = await worker.call(len(raw), partial(json.loads, raw))
    items = [_listed(item, response_id, place) for place, item in enumerate(stored)]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after: {after[:100]!r} is no item of it", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(items),
    )


def _listed(item: JSON, response_id: str, place: int) -> JSON:
    """Return an item of the input with the fields that clients expect."""
    prefix = PREFIXES.get(item["type"], "fco")
    listed: JSON = {"id": f"{prefix}_{response_id.removeprefix('resp_')}_i{place}"} | item
    if item["type"] == "reasoning":
        return listed | {"summary": item.get("summary", [])}
    listed["status"] = "completed"
    name = "content" if item["type"] == "message" else "output"
    if name in item:
        is_answer = item.get("role") == "assistant"
        more = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        listed[name] = [part | more for part in item[name]]
    return listed


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _key(request: Request, response_id: str) -> Key:
    return state_of(request.scope).caller.salt, response_id
