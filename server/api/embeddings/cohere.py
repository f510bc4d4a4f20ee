"""Cohere's embeddings: POST /v2/embed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response

from kvasir.server.api.embeddings.figures import base64, listed, shortened
from kvasir.server.api.embeddings.requests import (
    PromptFields,
    QueueFields,
    check_dimensions,
    respond,
)
from kvasir.server.api.http.body import VectorRoute
from kvasir.server.api.http.responses import GENERATE_ERRORS, service_of, state_of
from kvasir.server.api.schemas import Items, ModelName, ResponseBody
from kvasir.server.engine.sampling import Floats
from kvasir.server.errors import InvalidRequestError

router = APIRouter(route_class=VectorRoute)

Purpose = Literal["search_document", "search_query", "classification", "clustering"]
Form = Literal["float", "base64", "ubinary", "binary"]
# The names of prompts for a purpose, in the models that have such prompts.
_PROMPTS: dict[Purpose, tuple[str, ...]] = {
    "search_document": ("search_document", "document", "passage"),
    "search_query": ("search_query", "query"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def _bits(vector: Floats) -> list[int]:
    """Return a bit for each number of a vector, 1 unless it is negative, eight of them a byte."""
    packed: list[int] = np.packbits(vector >= 0).tolist()
    return packed


_SHOWN: dict[Form, Callable[[Floats], Any]] = {
    "float": np.ndarray.tolist,
    "base64": base64,
    "ubinary": _bits,
    "binary": lambda vector: [byte - 128 for byte in _bits(vector)],
}


class EmbedTextsBody(QueueFields):
    """The body of POST /v2/embed."""

    model: ModelName = None
    texts: Items[str] = Field(min_length=1, description="Up to 2,048 texts.")
    input_type: Purpose = Field(
        description="What the vectors are for. Chooses the prompt before each text, if the model "
        "has one for it: `search_query` or `query`, `search_document`, `document` or `passage`."
    )
    embedding_types: list[Form] = Field(
        ["float"],
        min_length=1,
        description="Numbers; base64 of them as float32, little-endian; or their signs, eight a "
        "byte, the first one highest: `binary` is 128 less than `ubinary`.",
    )
    output_dimension: int | None = Field(
        None, ge=1, description="Keep so many numbers of a vector, and make its length 1 again."
    )
    truncate: Literal["NONE", "START", "END"] = Field(
        "NONE", description="The end at which too long texts are cut; `NONE` makes them a 400."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Cut texts to so many tokens; needs `truncate`."
    )


class ByType(ResponseBody):
    """The vectors in each form that was asked for."""

    floats: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None
    ubinary: list[list[int]] | None = None
    binary: list[list[int]] | None = None


class EmbeddingsByType(ResponseBody):
    """The response of /v2/embed."""

    id: str
    embeddings: ByType
    texts: list[str]
    meta: dict[str, dict[str, str | int]] = Field(
        description="`api_version.version`, and `tokens.input_tokens`."
    )
    response_type: Literal["embeddings_by_type"]


@router.post("/v2/embed", response_model=EmbeddingsByType, responses=GENERATE_ERRORS)
async def embed(request: Request, body: EmbedTextsBody) -> Response:
    """Return a vector for each text, as Cohere does in its second version."""
    service, n = service_of(request), body.output_dimension
    check_dimensions(service, n, "output_dimension")
    if body.max_tokens is not None and body.truncate == "NONE":
        message = 'max_tokens: say with truncate, "START" or "END", where longer texts are cut'
        raise InvalidRequestError(message, param="max_tokens")
    known = service.bundle.embedding.prompts
    fields = PromptFields(
        truncate=body.truncate != "NONE",
        truncate_prompt_tokens=body.max_tokens,
        truncation_direction="left" if body.truncate == "START" else "right",
        prompt_name=next((name for name in _PROMPTS[body.input_type] if name in known), None),
        timeout_ms=body.timeout_ms,
        priority=body.priority,
    )
    texts, forms = body.texts, dict.fromkeys(body.embedding_types)
    request_id = state_of(request.scope).id

    def show(vectors: list[Floats], n_tokens: int) -> Iterator[bytes]:
        kept = [shortened(vector, n) for vector in vectors]
        yield b'{"id":' + to_json(request_id) + b',"embeddings":{'
        for place, form in enumerate(forms):
            yield b'%s"%s":' % (b"," if place else b"", form.encode())
            yield from listed(map(_SHOWN[form], kept))
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": n_tokens}}
        tail = {"texts": texts, "meta": meta, "response_type": "embeddings_by_type"}
        yield b"}," + to_json(tail)[1:]

    return await respond(request, fields, texts, "texts", "pooled", show, dimensions=n)
