"""The parts that the routes of encoders share: fields of bodies, requests, and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from pydantic import AliasChoices, BeforeValidator, Field
from starlette.responses import Response

from kvasir.model.config import Pooling
from kvasir.server.api import schemas
from kvasir.server.api.embeddings import figures
from kvasir.server.api.http.pieces import Deferred, LazyList, Pieces, json_response
from kvasir.server.api.http.responses import served_model, state_of
from kvasir.server.engine.encoder.sequence import Encoding
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.encoding import MAX_INPUTS, Text, encode
from kvasir.server.requests.request import EmbeddingRequest, Output
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.requests.text_worker import SHORT

# Of a vector's number in an answer; in one that has none, of its memory.
_NUMBER_BYTES = {"float": 24, "base64": 6, "none": 4}
_SCORE_BYTES, _CHAR_BYTES = 40, 6  # of a label's score, and of its name

EncodingFormat = Annotated[
    Literal["float", "base64"],
    Field(description="Numbers, or base64 of their bytes as float32, little-endian."),
]
Dimensions = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="Keep so many numbers of a vector, and make its length 1 again."),
]

# Values that differ only in capitals cannot be names in generated clients, so they are undeclared.
_SIDES = {"Left": "left", "Right": "right"}
Side = Annotated[
    Literal["left", "right"],
    BeforeValidator(lambda side: _SIDES.get(side, side) if isinstance(side, str) else side),
]

# The JSON of an answer, from an array for each input and the number of tokens; its lists are lazy.
Show = Callable[[list[Floats], int], Any]


class QueueFields(schemas.RequestBody):
    """The fields of a request's place in the queue."""

    timeout_ms: schemas.Milliseconds | None = Field(
        None, description="Time from arrival to the answer. Default: `default_timeout_ms`."
    )
    priority: schemas.Priority = Field(
        0, description="Lower is earlier in the queue; 10 seconds of waiting outweigh one level."
    )


class EncoderFields(QueueFields):
    """The fields that most routes of encoders take."""

    truncate: bool = Field(False, description="Cut inputs of too many tokens; else they are a 400.")
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cut inputs to so many tokens; -1 is the model's limit, as `truncate`."
    )
    truncation_direction: Side = Field(
        "right",
        validation_alias=AliasChoices("truncation_direction", "truncation_side"),
        description="The end at which inputs are cut; TEI's `Left` and `Right` are taken, too. "
        "Also named `truncation_side`.",
    )


class PromptFields(EncoderFields):
    """The fields of routes whose texts may follow one of the model's prompts."""

    prompt_name: str | None = Field(
        None, description="The model's prompt to put before each text. Default: the model's choice."
    )


async def respond(
    request: Request,
    fields: EncoderFields,
    inputs: Sequence[Text | list[int]],
    param: str,
    output: Output,
    show: Show,
    form: str = "float",
    dimensions: int | None = None,
    n_beside: int = 0,
) -> Response:
    """Return the response to a request; `param` names the field of its inputs in errors.

    form: "float", "base64" or "none", of the answer's vectors. dimensions: if not all are shown.
    n_beside: inputs that are not of that field.

    The request runs when the response is sent: nothing holds its body any more.
    Raises InvalidRequestError for inputs or a prompt that the model cannot take.
    """
    served, state = served_model(request), state_of(request.scope)
    if (n := len(inputs) - n_beside) > MAX_INPUTS:
        message = f"{param}: {n} inputs are too many: at most {MAX_INPUTS} may be given"
        raise InvalidRequestError(message, param=param)
    encodings = await _encodings(served, fields, inputs, param)
    if output == "scores":
        labels = pooling_of(served).labels
        n_each = sum(_SCORE_BYTES + _CHAR_BYTES * len(label) for label in labels)
    else:
        width = served.model_dir.config.d_model if output == "tokens" else _width(served)
        n_each = (dimensions or width) * _NUMBER_BYTES[form]
    n_vectors = sum(len(text.ids) for text in encodings) if output == "tokens" else len(encodings)
    n_bytes = n_vectors * n_each
    advice = f"send fewer or shorter {param}, or ask for fewer numbers of each"
    answers = served.answers[state.is_background]
    answers.check(n_bytes, advice, param)
    wanted = EmbeddingRequest(
        inputs=encodings,
        output=output,
        request_id=state.id,
        caller=state.caller,
        deadline=served.builder.deadline(state, fields.timeout_ms),
        priority=state.priority(fields.priority),
    )

    async def answer() -> Response:
        outputs = await served.embed(wanted)
        n_tokens = state.n_embedded = wanted.n_prompt_tokens
        work, worker = partial(show, outputs, n_tokens), served.text_worker
        if sum(array.size for array in outputs) <= SHORT:
            return json_response(b"".join(Pieces(work())), worker)
        shown = await asyncio.get_running_loop().run_in_executor(worker, work)
        return json_response(Pieces(shown), worker)

    return Deferred(answer, answers.hold(n_bytes))


class Pairs:
    """The pairs of texts to score: of one first text and each second, or of two lists.

    A model of vectors, which has no scores, gives the cosine of each two: the response's header
    x-kvasir-scores then says so. Raises InvalidRequestError for a model of several labels.
    """

    def __init__(self, request: Request, firsts: list[str], seconds: list[str]) -> None:
        served = served_model(request)
        self._by_cosine = served.task == "embed"
        self._pooling = pooling_of(served, None if self._by_cosine else 1)
        self._request, self._firsts, self._seconds = request, firsts, seconds

    async def respond(self, fields: EncoderFields, param: str, show: Show) -> Response:
        """Return the response, which shows what the model makes of the pairs; see `respond`."""
        firsts, seconds = self._firsts, self._seconds
        if self._by_cosine:
            state_of(self._request.scope).scored_by = "cosine"
            texts, n = [*firsts, *seconds], len(firsts)
            return await respond(
                self._request, fields, texts, param, "pooled", show, "none", n_beside=n
            )
        pairs = [*zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)]
        return await respond(self._request, fields, pairs, param, "scores", show)

    def scores(self, outputs: list[Floats]) -> Floats:
        """Return the scores [n_pairs] as the model computes them, or cosines."""
        if not self._by_cosine:
            return np.concatenate(outputs)
        firsts, seconds = outputs[: len(self._firsts)], outputs[len(self._firsts) :]
        cosines = [figures.cosine(firsts[i % len(firsts)], v) for i, v in enumerate(seconds)]
        return np.array(cosines, np.float32)

    def shown(self, score: np.float32) -> float:
        """Return a score from 0 to 1; a cosine as it is."""
        if self._by_cosine:
            return float(score)
        return figures.shares(np.array([score]), self._pooling)[0]


async def _encodings(
    served: ServedModel, fields: EncoderFields, inputs: Sequence[Text | list[int]], param: str
) -> list[Encoding]:
    """Return the tokens of inputs, after the prompt and cut as the fields say."""
    truncate_to = fields.truncate_prompt_tokens
    if truncate_to == -1 or (truncate_to is None and fields.truncate):
        truncate_to = served.builder.max_model_len
    work = partial(
        encode,
        *(served.builder, inputs, param),
        prompt=_prompt(served, fields, inputs),
        truncate_to=truncate_to,
        side=fields.truncation_direction,
    )
    size = sum(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in inputs)
    return await served.text_worker.call(size, work)


def each(outputs: list[Floats], item: Callable[[int, Floats], Any]) -> LazyList:
    """Return the list of what `item` returns for each input's place and array."""
    return LazyList([*enumerate(outputs)], lambda placed: item(*placed))


def _prompt(served: ServedModel, fields: EncoderFields, inputs: Sequence[Text | list[int]]) -> str:
    """Return the prompt that precedes texts."""
    given = fields.prompt_name if isinstance(fields, PromptFields) else None
    prompts = served.model_dir.embedding.prompts
    name = given or served.model_dir.embedding.default_prompt_name
    if given is not None and any(isinstance(text, list) for text in inputs):
        message = "prompt_name is for texts: token ids are read as they are; leave it out"
        raise InvalidRequestError(message, param="prompt_name")
    if name is None:
        return ""
    if name not in prompts:
        names = ", ".join(map(repr, prompts)) or "none"
        message = f"prompt_name: the model has no prompt {name!r}; it has {names}"
        raise InvalidRequestError(message, param="prompt_name")
    return prompts[name]


def check_dimensions(served: ServedModel, n: int | None, param: str) -> None:
    """Raise InvalidRequestError if vectors of n numbers are asked for, and the model's have less.

    param: the field that asks for them.
    """
    if n is not None and n > (d_out := _width(served)):
        message = f"{param}: {n} are more than the model's {d_out}"
        raise InvalidRequestError(message, param=param)


def _width(served: ServedModel) -> int:
    """Return the numbers of a text's vector."""
    projections = pooling_of(served).projections
    return projections[-1].d_out if projections else served.model_dir.config.d_model


def pooling_of(served: ServedModel, n_labels: int | None = None) -> Pooling:
    """Return how the model makes a vector, or scores, of a text.

    Raises InvalidRequestError for another number of labels than `n_labels`, if that is given.
    """
    pooling = served.model_dir.config.pooling
    assert pooling is not None
    if n_labels not in (None, len(pooling.labels)):
        raise InvalidRequestError(
            f"the model {served.name!r} has the labels {', '.join(pooling.labels)}; this path is "
            f"for models with {n_labels}; see /predict and /v1/classify",
            param="model",
        )
    return pooling
