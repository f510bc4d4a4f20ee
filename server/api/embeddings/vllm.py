"""The routes of vLLM's encoders: POST /score, /classify, both below /v1 too, and /pooling."""

from __future__ import annotations

from time import time
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import AliasChoices, Field
from starlette.responses import Response

from kvasir.server.api.embeddings import figures
from kvasir.server.api.embeddings.openai import InputUsage
from kvasir.server.api.embeddings.requests import (
    EncoderFields,
    EncodingFormat,
    Pairs,
    PromptFields,
    each,
    pooling_of,
    respond,
)
from kvasir.server.api.http.body import EncoderRoute, LabelRoute, PairRoute
from kvasir.server.api.http.pieces import LazyList
from kvasir.server.api.http.responses import GENERATE_ERRORS, served_model, state_of
from kvasir.server.api.openai.schemas import Prompts
from kvasir.server.api.schemas import Items, ModelName, ResponseBody, Share, Size
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.request import Output

router = APIRouter(route_class=EncoderRoute)
label_router = APIRouter(route_class=LabelRoute)
pair_router = APIRouter(route_class=PairRoute)

_Texts = str | Items[str]
# What each task of /pooling asks for, and the purpose of the models that can do it.
_TASKS: dict[str, tuple[Output, str]] = {
    "embed": ("pooled", "embed"),
    "token_embed": ("tokens", "embed"),
    "classify": ("scores", "classify"),
}


class ScoreBody(EncoderFields):
    """The body of POST /score and /v1/score."""

    model: ModelName = None
    text_1: _Texts = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="A text, or a list of up to 2,048. Also named `queries`, `data_1`.",
    )
    text_2: _Texts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The texts to compare with it, or with each. Also named `documents`, `items`, "
        "`data_2`.",
    )


class Score(ResponseBody):
    """The score of two texts."""

    index: Size
    object: Literal["score"]
    score: float


class _Listed(ResponseBody):
    """The fields of every response beside its data."""

    id: str
    object: Literal["list"]
    created: int = Field(description="Unix time.")
    model: str
    usage: InputUsage


class Scores(_Listed):
    """The response of /score and /v1/score."""

    data: list[Score]


class ClassifyBody(EncoderFields):
    """The body of POST /classify and /v1/classify."""

    model: ModelName = None
    input: Prompts = Field(description="Text, token ids, or a list of up to 2,048 of either.")


class Classified(ResponseBody):
    """The likeliest label of an input, and the probabilities of all, in the model's order."""

    index: Size
    label: str
    probs: list[Share]
    num_classes: Size


class Classification(_Listed):
    """The response of /classify and /v1/classify."""

    data: list[Classified]


class PoolingBody(PromptFields):
    """The body of POST /pooling."""

    model: ModelName = None
    input: Prompts = Field(description="Text, token ids, or a list of up to 2,048 of either.")
    task: Literal["embed", "token_embed", "classify"] | None = Field(
        None,
        description="A vector of each input, vectors of its tokens, or the probabilities of its "
        "labels. Default: the first, or of a model with labels the last.",
    )
    encoding_format: EncodingFormat = "float"


class Pooled(ResponseBody):
    """The numbers of an input."""

    index: Size
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PooledInputs(_Listed):
    """The response of /pooling."""

    data: list[Pooled]


@pair_router.post("/score", response_model=Scores, responses=GENERATE_ERRORS)
@pair_router.post("/v1/score", response_model=Scores, responses=GENERATE_ERRORS)
async def score(request: Request, body: ScoreBody) -> Response:
    """Return the scores of pairs of texts, as vLLM does: of a model of vectors their cosines."""
    head = _head(request, "score")
    both = body.text_1, body.text_2
    firsts, seconds = ([given] if isinstance(given, str) else given for given in both)
    if not (firsts and seconds) or len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"text_1: {len(firsts)} texts cannot be compared with {len(seconds)}; give one, or as "
            "many as in text_2",
            param="text_1",
        )
    pairs = Pairs(request, firsts, seconds)

    def show(outputs: list[Floats], n_tokens: int) -> dict[str, Any]:
        scores = pairs.scores(outputs)

        def scored(index: int) -> dict[str, Any]:
            return {"index": index, "object": "score", "score": pairs.shown(scores[index])}

        data = LazyList(range(len(scores)), scored)
        return head | {"data": data, "usage": figures.usage(n_tokens)}

    return await pairs.respond(body, "text_2", show)


@label_router.post("/classify", response_model=Classification, responses=GENERATE_ERRORS)
@label_router.post("/v1/classify", response_model=Classification, responses=GENERATE_ERRORS)
async def classify(request: Request, body: ClassifyBody) -> Response:
    """Return each text's label and the probabilities of all labels, as vLLM does."""
    pooling, head = pooling_of(served_model(request)), _head(request, "classify")

    def classified(index: int, scores: Floats) -> dict[str, Any]:
        label, probs = pooling.labels[int(scores.argmax())], figures.shares(scores, pooling)
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    def show(outputs: list[Floats], n_tokens: int) -> dict[str, Any]:
        return head | {"data": each(outputs, classified), "usage": figures.usage(n_tokens)}

    return await respond(request, body, body.input, "input", "scores", show)


@router.post("/pooling", response_model=PooledInputs, responses=GENERATE_ERRORS)
async def pool(request: Request, body: PoolingBody) -> Response:
    """Return what the model makes of each text, as vLLM does."""
    served, head = served_model(request), _head(request, "pool")
    task, pooling = body.task or served.task, pooling_of(served)
    output, purpose = _TASKS[task]
    if purpose != served.task:
        can = " or ".join(repr(name) for name in _TASKS if _TASKS[name][1] == served.task)
        message = f"task: the model {served.name!r} can do {can}, not {task!r}"
        raise InvalidRequestError(message, param="task")
    form = body.encoding_format

    def pooled(index: int, numbers: Floats) -> dict[str, Any]:
        if output == "scores":
            numbers = np.array(figures.shares(numbers, pooling), np.float32)
        return {"index": index, "object": "pooling", "data": figures.FORMATS[form](numbers)}

    def show(outputs: list[Floats], n_tokens: int) -> dict[str, Any]:
        return head | {"data": each(outputs, pooled), "usage": figures.usage(n_tokens)}

    return await respond(request, body, body.input, "input", output, show, form)


def _head(request: Request, kind: str) -> dict[str, Any]:
    """Return the fields of an answer before its data."""
    head = {"id": f"{kind}-{state_of(request.scope).id}", "object": "list", "created": int(time())}
    return head | {"model": served_model(request).name}
