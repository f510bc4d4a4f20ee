"""Cohere's routes: POST /v1/embed and /v2/embed; /v1/rerank, as Jina too, and /v2/rerank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from kvasir.server.api.embeddings import figures
from kvasir.server.api.embeddings.openai import InputUsage
from kvasir.server.api.embeddings.requests import (
    Dimensions,
    EncoderFields,
    Pairs,
    PromptFields,
    QueueFields,
    check_dimensions,
    respond,
)
from kvasir.server.api.http.body import PairRoute, VectorRoute
from kvasir.server.api.http.pieces import LazyList
from kvasir.server.api.http.responses import GENERATE_ERRORS, served_model, state_of
from kvasir.server.api.schemas import Items, ModelName, ResponseBody, Size
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import InvalidRequestError

router = APIRouter(route_class=VectorRoute)
pair_router = APIRouter(route_class=PairRoute)

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


_SHOWN: dict[str, Callable[[Floats], Any]] = figures.FORMATS | {
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
    embedding_types: Items[Form] = Field(
        ["float"],
        min_length=1,
        description="Numbers; base64 of them as float32, little-endian; or their signs, eight a "
        "byte, the first one highest: `binary` is 128 less than `ubinary`.",
    )
    output_dimension: Dimensions = None
    truncate: Literal["NONE", "START", "END"] = Field(
        "NONE", description="The end at which too long texts are cut; `NONE` makes them a 400."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Cut texts to so many tokens; needs `truncate`."
    )


class EmbedTextsV1Body(EmbedTextsBody):
    """The body of POST /v1/embed."""

    input_type: Purpose | None = Field(  # type: ignore[assignment]
        None, description="As in /v2/embed. Default: for the model to choose."
    )
    embedding_types: Items[Form] | None = Field(  # type: ignore[assignment]
        None, min_length=1, description="As in /v2/embed. Default: numbers, in one list."
    )


class ByType(ResponseBody):
    """The vectors in each form that was asked for."""

    floats: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None
    ubinary: list[list[int]] | None = None
    binary: list[list[int]] | None = None


class _Embeddings(ResponseBody):
    id: str
    texts: list[str]
    meta: dict[str, dict[str, str | int]] = Field(
        description="`api_version.version`, and `tokens.input_tokens`."
    )


class EmbeddingsByType(_Embeddings):
    """The response of /v2/embed, and of /v1/embed with `embedding_types`."""

    embeddings: ByType
    response_type: Literal["embeddings_by_type"]


class EmbeddingsFloats(_Embeddings):
    """The response of /v1/embed."""

    embeddings: list[list[float]]
    response_type: Literal["embeddings_floats"]


@router.post(
    "/v1/embed", response_model=EmbeddingsFloats | EmbeddingsByType, responses=GENERATE_ERRORS
)
async def embed_v1(request: Request, body: EmbedTextsV1Body) -> Response:
    """Return a vector for each text, as Cohere does in its first version."""
    return await _embed(request, body, "1")


@router.post("/v2/embed", response_model=EmbeddingsByType, responses=GENERATE_ERRORS)
async def embed_v2(request: Request, body: EmbedTextsBody) -> Response:
    """Return a vector for each text, as Cohere does in its second version."""
    return await _embed(request, body, "2")


async def _embed(request: Request, body: EmbedTextsBody, version: str) -> Response:
    served, n = served_model(request), body.output_dimension
    check_dimensions(served, n, "output_dimension")
    if body.max_tokens is not None and body.truncate == "NONE":
        message = 'max_tokens: say with truncate, "START" or "END", where longer texts are cut'
        raise InvalidRequestError(message, param="max_tokens")
    prompts, wanted = served.model_dir.embedding.prompts, _PROMPTS.get(body.input_type, ())
    fields = PromptFields(
        truncate=body.truncate != "NONE",
        truncate_prompt_tokens=body.max_tokens,
        truncation_direction="left" if body.truncate == "START" else "right",
        prompt_name=next((name for name in wanted if name in prompts), None),
        timeout_ms=body.timeout_ms,
        priority=body.priority,
    )
    texts, forms = body.texts, body.embedding_types
    request_id = state_of(request.scope).id

    def shown(form: str, vector: Floats) -> Any:
        return _SHOWN[form](figures.shortened(vector, n))

    def show(vectors: list[Floats], n_tokens: int) -> dict[str, Any]:
        lists = {form: LazyList(vectors, partial(shown, form)) for form in forms or ("float",)}
        return {
            "id": request_id,
            "embeddings": lists if forms else lists["float"],
            "texts": LazyList(texts, str),
            "meta": _meta(version, n_tokens),
            "response_type": "embeddings_by_type" if forms else "embeddings_floats",
        }

    return await respond(request, fields, texts, "texts", "pooled", show, dimensions=n)


class Document(BaseModel):
    """A text that may answer the question. Further fields have no effect."""

    model_config = ConfigDict(strict=True)

    text: str


class RankBody(EncoderFields):
    """The body of POST /v1/rerank and /v2/rerank."""

    model: ModelName = None
    query: str = Field(description="The question.")
    documents: Items[str | Document] = Field(
        min_length=1, description="Up to 2,048 texts that may answer it, or objects with `text`."
    )
    top_n: int | None = Field(
        None, ge=1, description="Return only so many, the best. Default: all."
    )
    return_documents: bool | None = Field(
        None, description="Return the texts, too. Default: true on /v1/rerank, false on /v2/rerank."
    )


class Ranked(ResponseBody):
    """A document's place in the order."""

    index: Size = Field(description="Its place in the request.")
    relevance_score: float = Field(description="From 0 to 1; of a model of vectors, the cosine.")
    document: Document | None = None


class Ranking(ResponseBody):
    """The response of both: Cohere's `id` and `meta`, Jina's `model` and `usage`."""

    id: str
    model: str
    results: list[Ranked] = Field(description="The best first.")
    usage: InputUsage
    meta: dict[str, dict[str, str | int]] = Field(
        description="`api_version.version`, of the path, and `tokens.input_tokens`."
    )


@pair_router.post("/v1/rerank", response_model=Ranking, responses=GENERATE_ERRORS)
async def rank_v1(request: Request, body: RankBody) -> Response:
    """Order documents by how well they answer a question, as Cohere and Jina do."""
    return await _rank(request, body, "1")


@pair_router.post("/v2/rerank", response_model=Ranking, responses=GENERATE_ERRORS)
async def rank_v2(request: Request, body: RankBody) -> Response:
    """Order documents as /v1/rerank does, in Cohere's second version."""
    return await _rank(request, body, "2")


async def _rank(request: Request, body: RankBody, version: str) -> Response:
    served, top_n = served_model(request), body.top_n
    texts = [given if isinstance(given, str) else given.text for given in body.documents]
    has_texts = version == "1" if body.return_documents is None else body.return_documents
    head = {"id": state_of(request.scope).id, "model": served.name}
    pairs = Pairs(request, [body.query], texts)

    def show(outputs: list[Floats], n_tokens: int) -> dict[str, Any]:
        scores = pairs.scores(outputs)

        def ranked(index: int) -> dict[str, Any]:
            rank = {"index": index, "relevance_score": pairs.shown(scores[index])}
            return rank | ({"document": {"text": texts[index]}} if has_texts else {})

        results = LazyList(figures.best_first(scores)[:top_n], ranked)
        tail = {"usage": figures.usage(n_tokens), "meta": _meta(version, n_tokens)}
        return head | {"results": results} | tail

    return await pairs.respond(body, "documents", show)


def _meta(version: str, n_tokens: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "tokens": {"input_tokens": n_tokens}}
