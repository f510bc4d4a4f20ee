"""Documents by their scores: POST /v1/rerank and /v2/rerank, as Cohere and Jina."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from kvasir.server.api.embeddings.figures import best_first, enveloped, shares, usage
from kvasir.server.api.embeddings.openai import InputUsage
from kvasir.server.api.embeddings.requests import EncoderFields, pooling_of, respond
from kvasir.server.api.http.body import LabelRoute
from kvasir.server.api.http.responses import GENERATE_ERRORS, service_of, state_of
from kvasir.server.api.schemas import Items, ModelName, ResponseBody, Share, Size
from kvasir.server.engine.sampling import Floats

router = APIRouter(route_class=LabelRoute)


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
    relevance_score: Share
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


@router.post("/v1/rerank", response_model=Ranking, responses=GENERATE_ERRORS)
async def rank_v1(request: Request, body: RankBody) -> Response:
    """Order documents by how well they answer a question, as Cohere and Jina do."""
    return await _rank(request, body, "1")


@router.post("/v2/rerank", response_model=Ranking, responses=GENERATE_ERRORS)
async def rank_v2(request: Request, body: RankBody) -> Response:
    """Order documents as /v1/rerank does, in Cohere's second version."""
    return await _rank(request, body, "2")


async def _rank(request: Request, body: RankBody, version: str) -> Response:
    service = service_of(request)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    has_texts = version == "1" if body.return_documents is None else body.return_documents
    head = {"id": state_of(request.scope).id, "model": service.name}
    pooling, top_n = pooling_of(service, n_labels=1), body.top_n

    def show(outputs: list[Floats], n_tokens: int) -> Iterator[bytes]:
        def ranked(place: int) -> dict[str, Any]:
            found = {"index": place, "relevance_score": shares(outputs[place], pooling)[0]}
            return {**found, "document": {"text": texts[place]}} if has_texts else found

        items = map(ranked, best_first(np.concatenate(outputs))[:top_n])
        meta = {"api_version": {"version": version}, "tokens": {"input_tokens": n_tokens}}
        return enveloped(head, "results", items, {"usage": usage(n_tokens), "meta": meta})

    pairs = [(body.query, text) for text in texts]
    return await respond(request, body, pairs, "documents", "scores", show)
