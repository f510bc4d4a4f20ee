"""The routes of Hugging Face's TEI: /embed, /embed_all, /similarity, /rerank, /predict; /info."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.model.config import Pooling
from kvasir.server.api.embeddings import figures
from kvasir.server.api.embeddings.requests import (
    EncoderFields,
    Pairs,
    PromptFields,
    check_dimensions,
    each,
    pooling_of,
    respond,
)
from kvasir.server.api.http.body import LabelRoute, PairRoute, VectorRoute
from kvasir.server.api.http.pieces import LazyList
from kvasir.server.api.http.responses import GENERATE_ERRORS, served_model
from kvasir.server.api.openai.schemas import Prompts
from kvasir.server.api.schemas import Items, ModelName, RequestBody, ResponseBody, Size
from kvasir.server.engine.encoder.engine import TOKEN_BUDGET
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.encoding import MAX_INPUTS
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.requests.text_worker import THREADS

router = APIRouter(route_class=VectorRoute)
label_router = APIRouter(route_class=LabelRoute)
pair_router = APIRouter(route_class=PairRoute)

_RawScores = Annotated[bool, Field(description="Return scores as the model computes them.")]


class EmbedAllBody(PromptFields):
    """The body of POST /embed_all."""

    model: ModelName = None
    inputs: Prompts = Field(description="Text, token ids, or a list of up to 2,048 of either.")


class EmbedBody(EmbedAllBody):
    """The body of POST /embed."""

    normalize: bool = Field(True, description="Make the length of each vector 1.")
    dimensions: int | None = Field(
        None, ge=1, description="Keep so many numbers of each vector, before `normalize`."
    )


class Sentences(RequestBody):
    """A text, and others to compare it with."""

    source_sentence: str = Field(description="The text to compare with others.")
    sentences: Items[str] = Field(min_length=1, description="The others.")


class SimilarityBody(RequestBody):
    """The body of POST /similarity."""

    model: ModelName = None
    inputs: Sentences = Field(description="See below.")
    parameters: PromptFields = Field(
        default_factory=lambda: PromptFields.model_validate({}), description="See above."
    )


class RerankBody(EncoderFields):
    """The body of POST /rerank."""

    model: ModelName = None
    query: str = Field(description="The question.")
    texts: Items[str] = Field(min_length=1, description="The texts that may answer it.")
    raw_scores: _RawScores = False
    return_text: bool = Field(False, description="Return the texts, too.")


_OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2)]


class PredictBody(EncoderFields):
    """The body of POST /predict."""

    model: ModelName = None
    inputs: str | _OneOrTwo | Annotated[Items[_OneOrTwo], Field(min_length=1)] = Field(
        description="Text, a list of one or two that are read together, or a list of such lists."
    )
    raw_scores: _RawScores = False


class Rank(ResponseBody):
    """A text's place in the order."""

    index: Size = Field(description="Its place in the request.")
    score: float
    text: str | None = None


class Prediction(ResponseBody):
    """The score of a label."""

    score: float
    label: str


class EncoderInfo(ResponseBody, json_schema_serialization_defaults_required=True):
    """The response of /info for an encoder. model_type: its kind, and the kind's own fields."""

    model_id: str
    model_sha: None = None
    model_dtype: str
    model_type: dict[Literal["embedding", "classifier", "reranker"], dict[str, Any]]
    max_concurrent_requests: Size
    max_input_length: Size
    max_batch_tokens: Size
    max_batch_requests: Size
    max_client_batch_size: Size = MAX_INPUTS
    auto_truncate: Literal[False] = False
    tokenization_workers: Size = THREADS
    version: str
    sha: None = None
    docker_label: None = None


def encoder_info(served: ServedModel, max_concurrent_requests: int) -> EncoderInfo:
    """Return an encoder and its limits."""
    model, settings, pooling = served.describe_model(), served.settings, pooling_of(served)
    kind: Literal["embedding", "classifier", "reranker"] = "embedding"
    fields: dict[str, Any] = {"pooling": pooling.kind}
    if pooling.labels:
        kind = "classifier" if pooling.labels[1:] else "reranker"
        names = {str(i): label for i, label in enumerate(pooling.labels)}
        fields = {"id2label": names, "label2id": {label: int(i) for i, label in names.items()}}
    return EncoderInfo(
        model_id=model["model"],
        model_dtype=model["precision"],
        model_type={kind: fields},
        max_concurrent_requests=max_concurrent_requests,
        max_input_length=served.builder.max_model_len,
        max_batch_tokens=settings.chunk_size or TOKEN_BUDGET,
        max_batch_requests=settings.max_num_seqs,
        version=version("kvasir-lm"),
    )


@router.post("/embed", response_model=list[list[float]], responses=GENERATE_ERRORS)
async def embed(request: Request, body: EmbedBody) -> Response:
    """Return a vector for each text, as TEI does."""
    served, n = served_model(request), body.dimensions
    check_dimensions(served, n, "dimensions")
    is_unit = pooling_of(served).normalize
    if is_unit and not body.normalize:
        message = "normalize: the model's vectors always have length 1; leave it out"
        raise InvalidRequestError(message, param="normalize")
    scales = body.normalize and (n is not None or not is_unit)

    def scaled(_index: int, vector: Floats) -> Any:
        return (figures.unit(vector[:n]) if scales else vector[:n]).tolist()

    def show(vectors: list[Floats], _n_tokens: int) -> LazyList:
        return each(vectors, scaled)

    return await respond(request, body, body.inputs, "inputs", "pooled", show, dimensions=n)


@router.post("/embed_all", response_model=list[list[list[float]]], responses=GENERATE_ERRORS)
async def embed_all(request: Request, body: EmbedAllBody) -> Response:
    """Return a vector for each token of each text, as TEI does."""

    def show(outputs: list[Floats], _n_tokens: int) -> list[LazyList]:  # each [n_tokens, d_model]
        return [LazyList(vectors, np.ndarray.tolist) for vectors in outputs]

    return await respond(request, body, body.inputs, "inputs", "tokens", show)


@router.post("/similarity", response_model=list[float], responses=GENERATE_ERRORS)
async def similarity(request: Request, body: SimilarityBody) -> Response:
    """Return the cosine of a text's vector and those of others, as TEI does."""

    def show(vectors: list[Floats], _n_tokens: int) -> LazyList:
        return LazyList(vectors[1:], partial(figures.cosine, vectors[0]))

    inputs = [body.inputs.source_sentence, *body.inputs.sentences]
    fields = body.parameters
    return await respond(request, fields, inputs, "inputs", "pooled", show, "none", n_beside=1)


@pair_router.post("/rerank", response_model=list[Rank], responses=GENERATE_ERRORS)
async def rerank(request: Request, body: RerankBody) -> Response:
    """Return the scores of texts that may answer a question, best first, as TEI does."""
    pairs, is_raw = Pairs(request, [body.query], body.texts), body.raw_scores
    texts = body.texts if body.return_text else None

    def show(outputs: list[Floats], _n_tokens: int) -> LazyList:
        scores = pairs.scores(outputs)

        def rank(index: int) -> dict[str, Any]:
            shown = float(scores[index]) if is_raw else pairs.shown(scores[index])
            score = {"index": index, "score": shown}
            return score if texts is None else {**score, "text": texts[index]}

        return LazyList(figures.best_first(scores), rank)

    return await pairs.respond(body, "texts", show)


@label_router.post(
    "/predict", response_model=list[Prediction] | list[list[Prediction]], responses=GENERATE_ERRORS
)
async def predict(request: Request, body: PredictBody) -> Response:
    """Return the scores of a text's labels, the highest first, as TEI does."""
    pooling = pooling_of(served_model(request))
    shown, labels = _shown(pooling, raw=body.raw_scores), pooling.labels
    is_batch = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
    batch: Any = body.inputs if is_batch else [body.inputs]

    def predictions(_index: int, scores: Floats) -> list[dict[str, Any]]:
        by_label = shown(scores)
        return [{"score": by_label[i], "label": labels[i]} for i in figures.best_first(scores)]

    def show(outputs: list[Floats], _n_tokens: int) -> LazyList | list[dict[str, Any]]:
        return each(outputs, predictions) if is_batch else predictions(0, outputs[0])

    lists = [[given] if isinstance(given, str) else given for given in batch]
    inputs = [tuple(texts) if texts[1:] else texts[0] for texts in lists]
    return await respond(request, body, inputs, "inputs", "scores", show)


def _shown(pooling: Pooling, *, raw: bool) -> Callable[[Floats], list[float]]:
    """Return the function from an input's scores to those that are shown."""
    return np.ndarray.tolist if raw else partial(figures.shares, pooling=pooling)
