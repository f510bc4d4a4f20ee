"""POST /explain: the attention in a text, and the likeliest next tokens."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter, sleep
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from pydantic_core import to_json
from starlette.responses import Response

from model.bundle import ModelBundle
from server import explain as explainer
from server.api import schemas
from server.api.http.body import BodyRoute
from server.api.http.responses import (
    BODY_ERRORS,
    json_response,
    service_of,
    state_of,
    unless_disconnected,
)
from server.engine.sampling import SamplingParams
from server.errors import InvalidRequestError, OverloadedError
from server.explain import Explainer, NextToken, check_index, check_length, most_tokens
from server.requests.admission.callers import Caller
from server.requests.builder import RequestOptions
from server.requests.target import TargetOptions, target_prefix

router = APIRouter(route_class=BodyRoute)

MAX_WEIGHTS = 2**20  # of an answer, some 12 bytes each: four heads' maps of 512 tokens
# A cancelled explanation keeps running, so this also limits how many one client can leave behind.
_MAX_INSIDE = 4  # explanations that run or wait
_THREADS = 1  # the engine needs the other processors
_NICENESS = 10  # where all processors are busy, a tenth of an engine thread's share


class ExplainBody(schemas.RequestBody):
    """The body of POST /explain. `text` may be called `prompt`."""

    model: schemas.ModelName = None
    text: str | None = Field(None, description="The text for the model to read, or its source.")
    prompt: str | None = Field(None, description="Another name for `text`.")
    layers: schemas.Counts = Field(
        [0], min_length=1, description="Layers whose attention to return, from 0."
    )
    heads: schemas.Counts | None = Field(
        None, min_length=1, description="Heads of these layers, from 0. Default: all."
    )
    top_k: int = Field(10, ge=0, le=1000, description="Number of the likeliest next tokens.")
    target: str | None = Field(
        None, description="Encoder-decoders: the target. Default: the model's likeliest."
    )
    target_language: str | None = Field(
        None, description="Encoder-decoders: see `/v1/completions`."
    )

    @model_validator(mode="after")
    def _check_one_text(self) -> ExplainBody:
        if (self.text is None) == (self.prompt is None):
            raise ValueError("give either text or prompt; they are the same")
        return self


class HeadWeights(schemas.ResponseBody):
    """The weights of one attention head."""

    layer: schemas.Size
    head: schemas.Size
    weights: list[list[Annotated[float, Field(ge=0, le=1.001)]]] = Field(
        description="A row for each token, which sums to 1: how much it attends to each token."
    )


class Explanation(schemas.ResponseBody):
    """The attention in a text, or in a target and to its source, and the likeliest next tokens."""

    tokens: list[str] = Field(description="Of an encoder-decoder the target's.")
    token_ids: list[schemas.Size]
    next_tokens: list[NextToken] = Field(description="The likeliest first.")
    source_tokens: list[str] = Field([], description="Encoder-decoders only, as all of sources.")
    source_token_ids: list[schemas.Size] = Field([])
    attention: list[HeadWeights] = Field(description="By layer, then by head.")
    source_attention: list[HeadWeights] = Field(
        [], description="A row for each token, of its weights over the source's."
    )


class Explanations:
    """A server's explainer, in a thread that runs one explanation at a time.

    It is loaded for the first explanation, and holds the model's weights a second time from then.
    """

    def __init__(self, bundle: ModelBundle) -> None:
        self._bundle = bundle
        self._explainer: Explainer | None = None
        # Elsewhere than on Linux niceness belongs to the whole process.
        lower_priority = partial(os.nice, _NICENESS) if sys.platform == "linux" else None
        self._thread = ThreadPoolExecutor(1, "explain", initializer=lower_priority)
        self._n_inside = 0

    async def explain(
        self,
        token_ids: list[int],
        source_ids: list[int],
        layers: list[int],
        heads: list[int],
        top_k: int,
        caller: Caller,
    ) -> bytes:
        """Return an explanation as JSON; the text's tokens count as used by the caller.

        source_ids: of an encoder-decoder, whose text is the target. Raises OverloadedError if
        others wait already, or if the caller's tokens are used.
        """
        caller.check_tokens(perf_counter())
        if self._n_inside >= _MAX_INSIDE:
            raise OverloadedError("other texts are being explained; try again", retry_after=1)
        caller.n_used += len(token_ids) + len(source_ids)

        def work() -> bytes:
            if self._explainer is None:
                self._explainer = Explainer(self._bundle, _THREADS)
            explanation = self._explainer.explain_tokens(token_ids, layers, source_ids, top_k=top_k)
            return b"".join(_json(explanation, heads))

        self._n_inside += 1
        try:  # if the client disconnects, an explanation that waits is cancelled
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._n_inside -= 1


@router.post("/explain", response_model=Explanation, responses=BODY_ERRORS)
async def explain(request: Request, body: ExplainBody) -> Response:
    """Return the attention in a text, and the likeliest next tokens."""
    service = service_of(request)
    service.admission.check_open()
    config = service.bundle.config
    layers = sorted(set(body.layers))
    heads = sorted(set(range(config.n_head) if body.heads is None else body.heads))
    for layer in layers:
        check_index("layer", layer, config.n_layer)
    for head in heads:
        check_index("head", head, config.n_head)
    (prompt,) = await service.builder.tokenize([body.text or body.prompt or ""])
    token_ids, source_ids = prompt.ids, list[int]()
    if config.encoder is not None:
        check_length(len(prompt.ids), config.encoder)
        token_ids, source_ids = await _target(request, body, prompt.ids), prompt.ids
    elif body.target is not None or body.target_language is not None:
        raise InvalidRequestError("a model without an encoder has no target", param="target")
    check_length(len(token_ids), config)
    n_tokens = len(token_ids) + len(source_ids)
    n_weights = len(layers) * len(heads) * len(token_ids) * n_tokens
    if n_weights > MAX_WEIGHTS:
        raise InvalidRequestError(
            f"{len(layers)} layers and {len(heads)} heads of {n_tokens} tokens are {n_weights} "
            f"weights, more than the {MAX_WEIGHTS} that an answer may have; ask for fewer heads or "
            "layers, or send a shorter text",
            param="heads",
        )
    explanations: Explanations = request.app.state.explanations[service.name]
    caller = state_of(request.scope).caller
    work = explanations.explain(token_ids, source_ids, layers, heads, body.top_k, caller)
    response = json_response(await unless_disconnected(request.receive, work))
    service.metrics.used(caller.name, n_tokens, 0)
    return response


async def _target(request: Request, body: ExplainBody, source_ids: list[int]) -> list[int]:
    """Return the target that was given, or else the model's likeliest, from its first token on."""
    service = service_of(request)
    if body.target is not None:
        (given,) = await service.builder.tokenize([body.target], add_special_tokens=False)
        return target_prefix(service.bundle, body.target_language) + given.ids
    options = RequestOptions(
        prompts=[source_ids],
        params=SamplingParams(max_tokens=0, temperature=0.0),
        max_tokens=None,
        default_max_tokens=0,  # the longest target
        seed=0,
        target=TargetOptions(language=body.target_language),
    )
    wanted = await service.builder.build(options, state_of(request.scope))
    longest = most_tokens(service.bundle.config) - len(wanted.target_prefix)
    params = replace(wanted.params, max_tokens=min(wanted.params.max_tokens, longest))

    async def work() -> list[int]:
        async with service.complete(replace(wanted, params=params)) as completion:
            async for _ in completion.deltas():
                pass
            return completion.choices[0].sequence.token_ids

    return await unless_disconnected(request.receive, work())


def _json(explanation: explainer.Explanation, heads: list[int]) -> Iterator[bytes]:
    """Yield the JSON row by row."""
    known = {
        "tokens": explanation.tokens,
        "token_ids": explanation.token_ids,
        "next_tokens": explanation.next_tokens,
    }
    maps = {"attention": explanation.weights}
    if explanation.source_ids:
        known |= {
            "source_tokens": explanation.source_tokens,
            "source_token_ids": explanation.source_ids,
        }
        maps["source_attention"] = explanation.source_weights
    yield to_json(known)[:-1]
    for name, of_layers in maps.items():
        yield b',"%s":[' % name.encode()
        for i, (layer, head) in enumerate(product(of_layers, heads)):
            yield b'%s{"layer":%d,"head":%d,"weights":[' % (b"," if i else b"", layer, head)
            for row, weights in enumerate(of_layers[layer][head]):
                sleep(0)  # release the interpreter's lock, for which others would wait 5 ms
                yield (b"," if row else b"") + to_json(weights.tolist())
            yield b"]}"
        yield b"]"
    yield b"}"
