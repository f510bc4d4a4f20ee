"""OpenAI's embeddings: POST /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.server.api.embeddings import figures
from kvasir.server.api.embeddings.requests import (
    Dimensions,
    EncodingFormat,
    PromptFields,
    check_dimensions,
    each,
    respond,
)
from kvasir.server.api.http.body import VectorRoute
from kvasir.server.api.http.responses import GENERATE_ERRORS, served_model
from kvasir.server.api.openai.schemas import Prompts
from kvasir.server.api.schemas import ModelName, ResponseBody, Size
from kvasir.server.engine.sampling.params import Floats

router = APIRouter(route_class=VectorRoute)


class EmbeddingsBody(PromptFields):
    """The body of POST /v1/embeddings."""

    model: ModelName = None
    input: Prompts = Field(description="Text, token ids, or a list of up to 2,048 of either.")
    encoding_format: EncodingFormat = "float"
    dimensions: Dimensions = None


class Embedding(ResponseBody):
    """The vector of an input."""

    object: Literal["embedding"]
    index: Size
    embedding: list[float] | str


class InputUsage(ResponseBody):
    """Numbers of tokens, of which all are the inputs'."""

    prompt_tokens: Size
    total_tokens: Size


class Embeddings(ResponseBody):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: InputUsage


@router.post("/v1/embeddings", response_model=Embeddings, responses=GENERATE_ERRORS)
async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
    """Return a vector for each text, as OpenAI does."""
    served, n, form = served_model(request), body.dimensions, body.encoding_format
    check_dimensions(served, n, "dimensions")

    def embedding(index: int, vector: Floats) -> dict[str, Any]:
        shown = figures.FORMATS[form](figures.shortened(vector, n))
        return {"object": "embedding", "index": index, "embedding": shown}

    def show(vectors: list[Floats], n_tokens: int) -> dict[str, Any]:
        data, usage = each(vectors, embedding), figures.usage(n_tokens)
        return {"object": "list", "model": served.name, "data": data, "usage": usage}

    return await respond(request, body, body.input, "input", "pooled", show, form, n)
