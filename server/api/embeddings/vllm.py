"""The routes of vLLM's encoders: POST /score, /classify, both below /v1 too, and /pooling."""

from __future__ import annotations

from collections.abc import Iterator
from time import time
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import AliasChoices, Field
from starlette.responses import Response

from kvasir.server.api.embeddings.figures import base64, enveloped, shares, unit, usage
from kvasir.server.api.embeddings.openai import InputUsage
from kvasir.server.api.embeddings.requests import EncoderFields, PromptFields, pooling_of, respond
from kvasir.server.api.http.body import EncoderRoute, LabelRoute
from kvasir.server.api.http.responses import GENERATE_ERRORS, service_of, state_of
from kvasir.server.api.openai.schemas import Prompts
from kvasir.server.api.schemas import Items, ModelName, ResponseBody, Share, Size
from kvasir.server.engine.sampling import Floats
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.encoding import Text
from kvasir.server.requests.request import Output

router = APIRouter(route_class=EncoderRoute)
label_router = APIRouter(route_class=LabelRoute)

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
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or base64 of their bytes as float32, little-endian."
    )


class Pooled(ResponseBody):
    """The numbers of an input."""

    index: Size
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PooledInputs(_Listed):
    """The response of /pooling."""

    data: list[Pooled]


@router.post("/score", response_model=Scores, responses=GENERATE_ERRORS)
@router.post("/v1/score", response_model=Scores, responses=GENERATE_ERRORS)
async def score(request: Request, body: ScoreBody) -> Response:
    """Return the scores of pairs of texts, as vLLM does: of a model of vectors their cosines."""
    service, head = service_of(request), _head(request, "score")
    firsts, seconds = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if not (firsts and seconds) or len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"text_1: {len(firsts)} texts cannot be compared with {len(seconds)}; give one, or as "
            "many as in text_2",
            param="text_1",
        )
    is_cosine = service.task == "embed"
    pooling = pooling_of(service, None if is_cosine else 1)
    pairs: list[Text] = [*zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)]

    def scores(outputs: list[Floats]) -> Iterator[float]:
        if not is_cosine:
            yield from (shares(one, pooling)[0] for one in outputs)
            return
        units = [unit(one) for one in outputs]
        of_firsts, of_seconds = units[: len(firsts)], units[len(firsts) :]
        for place, other in enumerate(of_seconds):
            yield float(np.dot(of_firsts[place % len(firsts)], other))

    def show(outputs: list[Floats], n_tokens: int) -> Iterator[bytes]:
        items = (
            {"index": index, "object": "score", "score": one}
            for index, one in enumerate(scores(outputs))
        )
        return enveloped(head, "data", items, {"usage": usage(n_tokens)})

    if is_cosine:
        texts = [*firsts, *seconds]
        return await respond(request, body, texts, "text_2", "pooled", show, "none")
    return await respond(request, body, pairs, "text_2", "scores", show)


@label_router.post("/classify", response_model=Classification, responses=GENERATE_ERRORS)
@label_router.post("/v1/classify", response_model=Classification, responses=GENERATE_ERRORS)
async def classify(request: Request, body: ClassifyBody) -> Response:
    """Return each text's label and the probabilities of all labels, as vLLM does."""
    service = service_of(request)
    pooling, head = pooling_of(service), _head(request, "classify")

    def show(outputs: list[Floats], n_tokens: int) -> Iterator[bytes]:
        def classified(index: int) -> dict[str, Any]:
            label = pooling.labels[int(outputs[index].argmax())]
            probs = shares(outputs[index], pooling)
            return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

        items = map(classified, range(len(outputs)))
        return enveloped(head, "data", items, {"usage": usage(n_tokens)})

    return await respond(request, body, body.input, "input", "scores", show)


@router.post("/pooling", response_model=PooledInputs, responses=GENERATE_ERRORS)
async def pool(request: Request, body: PoolingBody) -> Response:
    """Return what the model makes of each text, as vLLM does."""
    service, head = service_of(request), _head(request, "pool")
    task, pooling = body.task or service.task, pooling_of(service)
    output, purpose = _TASKS[task]
    if purpose != service.task:
        can = " or ".join(repr(one) for one, (_, of) in _TASKS.items() if of == service.task)
        message = f"task: the model {service.name!r} can do {can}, not {task!r}"
        raise InvalidRequestError(message, param="task")
    as_text = body.encoding_format == "base64"

    def show(outputs: list[Floats], n_tokens: int) -> Iterator[bytes]:
        def pooled(index: int) -> dict[str, Any]:
            found = outputs[index]
            if output == "scores":
                found = np.array(shares(found, pooling), np.float32)
            data = base64(found) if as_text else found.tolist()
            return {"index": index, "object": "pooling", "data": data}

        items = map(pooled, range(len(outputs)))
        return enveloped(head, "data", items, {"usage": usage(n_tokens)})

    return await respond(request, body, body.input, "input", output, show, body.encoding_format)


def _head(request: Request, kind: str) -> dict[str, Any]:
    """Return the first fields of a response."""
    name, created = service_of(request).name, int(time())
    return {
        "id": f"{kind}-{state_of(request.scope).id}",
        "object": "list",
        "created": created,
        "model": name,
    }
