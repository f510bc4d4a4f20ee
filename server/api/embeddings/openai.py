"""OpenAI's embeddings: POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.server.api.embeddings.figures import base64, enveloped, shortened, usage
from kvasir.server.api.embeddings.requests import PromptFields, check_dimensions, respond
from kvasir.server.api.http.body import VectorRoute
from kvasir.server.api.http.responses import GENERATE_ERRORS, service_of
from kvasir.server.api.openai.schemas import Prompts
from kvasir.server.api.schemas import ModelName, ResponseBody, Size
from kvasir.server.engine.sampling import Floats

router = APIRouter(route_class=VectorRoute)


class EmbeddingsBody(PromptFields):
    """The body of POST /v1/embeddings."""

    model: ModelName = None
    input: Prompts = Field(description="Text, token ids, or a list of up to 2,048 of either.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or base64 of their bytes as float32, little-endian."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep so many numbers of a vector, and make its length 1 again."
    )


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
    service = service_of(request)
    n, form = body.dimensions, body.encoding_format
    check_dimensions(service, n, "dimensions")
    head = {"object": "list", "model": service.name}

    def show(vectors: list[Floats], n_tokens: int) -> Iterator[bytes]:
        def embedding(index: int) -> dict[str, Any]:
            kept = shortened(vectors[index], n)
            shown = base64(kept) if form == "base64" else kept.tolist()
            return {"object": "embedding", "index": index, "embedding": shown}

        items = map(embedding, range(len(vectors)))
        return enveloped(head, "data", items, {"usage": usage(n_tokens)})

    return await respond(request, body, body.input, "input", "pooled", show, form, n)
