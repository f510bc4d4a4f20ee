"""POST /explain: the attention in a text, and the likeliest next tokens."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ModelDirectory
from kvasir.model.platform.machine import return_freed_memory
from kvasir.server.api import schemas
from kvasir.server.api.explain.answers import Explanation, shown
from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.http.pieces import held_response, unless_disconnected
from kvasir.server.api.http.responses import BODY_ERRORS, served_model, state_of
from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.errors import InvalidRequestError, OverloadedError, UnavailableError
from kvasir.server.explain.explainer import Explainer, graph_path
from kvasir.server.explain.explanation import (
    Head,
    Questions,
    check_head,
    check_index,
    check_length,
    most_tokens,
)
from kvasir.server.requests.adapters.served import AdaptedModel
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.async_engine import AnyEngine
from kvasir.server.requests.builder import RequestOptions
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.requests.target import TargetOptions, target_prefix


class _Route(BodyRoute):
    """A route of the models that have attention.onnx."""

    loads = True

    def check(self, served: ServedModel) -> None:
        """Raise NotFoundError for a model without the graph."""
        graph_path(served.model_dir)


router = APIRouter(route_class=_Route)

MAX_WEIGHTS = 2**20  # of an answer, some 12 bytes each: four heads' maps of 512 tokens
# A cancelled explanation keeps running, so this also limits how many one client can leave behind.
_MAX_INSIDE = 4  # explanations that run or wait
_THREADS = 1  # the engine needs the other processors
_RETRY = 60  # seconds until memory may be free again
_NICENESS = 10  # where all processors are busy, a tenth of an engine thread's share


class HeadReference(schemas.RequestBody):
    """One head of a layer, both counted from 0."""

    layer: schemas.Count
    head: schemas.Count


class ExplainBody(schemas.RequestBody):
    """The body of POST /explain. `text` may be called `prompt`."""

    model: schemas.ModelName = None
    text: str | None = Field(None, description="The text for the model to read, or its source.")
    prompt: str | None = Field(None, description="Another name for `text`.")
    layers: schemas.Counts = Field(
        [0], min_length=1, description="Layers whose attention or memory to return, from 0."
    )
    heads: schemas.Counts | None = Field(
        None, description="Heads of these layers, from 0; `[]` for none. Default: all."
    )
    top_k: int = Field(10, ge=0, le=4096, description="Number of the likeliest next tokens.")
    position: schemas.Count | None = Field(
        None,
        description="Position of the token after which the next tokens come, from 0. Default: the "
        "last. Encoders have no next tokens, so no position, lens and entropies.",
    )
    without: list[HeadReference] = Field(
        [],
        max_length=schemas.MAX_NAMED_TOKENS,
        fail_fast=True,
        description='Heads, as `{"layer": 1, "head": 0}`, to switch off: what they collect '
        "becomes 0. All else in the answer is then of this model; `effect` compares it, if `top_k` "
        "is not 0.",
    )
    lens: int = Field(
        0, ge=0, le=20, description="Number of the likeliest tokens after each layer (logit lens)."
    )
    entropies: bool = Field(
        False, description="Return the entropy of every head's weights at the position."
    )
    head_values: HeadReference | None = Field(
        None, description="A head whose queries, keys, values and scores to return."
    )
    target: str | None = Field(
        None, description="Encoder-decoders: the target. Default: the model's likeliest."
    )
    source_language: str | None = Field(
        None, description="Encoder-decoders: see `/v1/completions`."
    )
    target_language: str | None = Field(None, description="The same.")

    @model_validator(mode="after")
    def _check_one_text(self) -> ExplainBody:
        if (self.text is None) == (self.prompt is None):
            raise ValueError("give either text or prompt; they are the same")
        return self


class Explanations:
    """The explainer of one model at a time, in a thread that runs one explanation at a time.

    It is loaded for a model's first explanation, and holds the weights a second time until another
    takes its place, the model is unloaded, or one to be loaded needs the room. free: returns the
    bytes that are there for it.
    """

    def __init__(self, free: Callable[[], int] | None = None) -> None:
        self._free = free
        self._explainers = WeakKeyDictionary[AnyEngine, Explainer]()
        # Elsewhere than on Linux niceness belongs to the whole process.
        lower_priority = partial(os.nice, _NICENESS) if sys.platform == "linux" else None
        self._thread = ThreadPoolExecutor(1, "explain", initializer=lower_priority)
        self._n_inside = 0

    async def explain(
        self,
        served: ServedModel,
        token_ids: list[int],
        source_ids: list[int],
        heads: dict[int, list[int]],
        questions: Questions,
        caller: Caller,
        adapter: Adapter | None,
    ) -> bytes:
        """Return an explanation as JSON; the text's tokens count as used by the caller.

        source_ids: of an encoder-decoder, whose text is the target. Raises OverloadedError if
        others wait already, or if the caller's tokens are used, and UnavailableError without room.
        """
        n_tokens, engine = len(token_ids) + len(source_ids), served.engine.engine
        assert engine is not None

        def work() -> bytes:
            explainer = self._explainers.get(engine) or self._open(served.model_dir, engine)
            # A layer's weights are found for all its heads.
            of_heads = [layer for layer, of_layer in heads.items() if of_layer]
            explanation = explainer.explain_tokens(
                token_ids, of_heads, source_ids, questions, adapter
            )
            return b"".join(shown(explanation, heads, served.model_dir.config))

        async with caller.tokens(n_tokens) as reservation:
            if self._n_inside >= _MAX_INSIDE:
                raise OverloadedError("other texts are being explained; try again", retry_after=1)
            reservation.n_used = n_tokens
            self._n_inside += 1
            try:  # if the client disconnects, an explanation that waits is cancelled
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            finally:
                self._n_inside -= 1

    async def clear(self) -> None:
        """Free the explainer's memory, once the explanations before have ended."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._explainers.clear)
        return_freed_memory()

    def _open(self, model_dir: ModelDirectory, engine: AnyEngine) -> Explainer:
        self._explainers.clear()
        needed = sum(file.stat().st_size for file in model_dir.path.glob("*.data"))
        if model_dir.manifest.precision == "int4":  # scales, 2 bytes of a block's 18, become 4
            needed += needed // 9
        if self._free is not None and needed > (n_free := self._free()):
            message = f"an explanation needs {needed:,} bytes, and {n_free:,} are free"
            raise UnavailableError(message, retry_after=_RETRY)
        explainer = self._explainers[engine] = Explainer(model_dir, _THREADS, engine.adapters)
        return explainer


@router.post("/explain", response_model=Explanation, responses=BODY_ERRORS)
async def explain(request: Request, body: ExplainBody) -> Response:
    """Return the attention in a text, and the likeliest next tokens."""
    served, state = served_model(request), state_of(request.scope)
    served.admission.check_open()
    config = served.model_dir.config
    layers = sorted(set(body.layers))
    heads = _heads(body.heads, layers, config)
    param = "prompt" if body.text is None else "text"
    (prompt,) = await served.builder.tokenize(
        [body.text or body.prompt or ""], param=param, source_language=body.source_language
    )
    token_ids, source_ids = prompt.ids, list[int]()
    check_length(len(prompt.ids), config.encoder or config, param)
    if config.encoder is not None:
        token_ids, source_ids = await _target(request, body, prompt.ids), prompt.ids
        check_length(len(token_ids), config, "target")
    else:
        for name in ("target", "source_language", "target_language"):
            if getattr(body, name) is not None:
                message = f"{name} is for a model with an encoder; leave it out"
                raise InvalidRequestError(message, param=name)
    wanted = body.head_values
    questions = Questions(
        top_k=body.top_k,
        position=body.position,
        without=tuple(Head(given.layer, given.head) for given in body.without),
        lens=body.lens,
        entropies=body.entropies,
        values_of=None if wanted is None else Head(wanted.layer, wanted.head),
    )
    questions.check(len(token_ids), config)
    n_tokens = len(token_ids) + len(source_ids)
    # A recurrent head has two maps.
    n_maps = sum(len(heads[i]) * (1 if config.attends(i) else 2) for i in layers)
    n_weights = n_maps * len(token_ids) * n_tokens
    if questions.values_of is not None:  # scores and their bias, queries, keys and values
        n_weights += len(token_ids) * (2 * len(token_ids) + 3 * config.head_dim)
    if n_weights > MAX_WEIGHTS:
        raise InvalidRequestError(
            f"{n_maps} maps of {n_tokens} tokens are {n_weights} weights, more than the "
            f"{MAX_WEIGHTS} that an answer may have; ask for fewer heads or layers, or send a "
            "shorter text",
            param="heads",
        )
    explanations: Explanations = request.app.state.explanations[state.model]
    async with served.holding() if isinstance(served, AdaptedModel) else nullcontext() as adapter:
        given = served, token_ids, source_ids, heads, questions, state.caller, adapter
        work = explanations.explain(*given)
        response = held_response(await unless_disconnected(request.receive, work), served)
    served.metrics.used(state.caller.name, n_tokens, 0)
    return response


def _heads(
    asked: list[int] | None, layers: list[int], config: TransformerConfig
) -> dict[int, list[int]]:
    """Return the asked heads of each layer; raises InvalidRequestError if it has them not."""
    heads: dict[int, list[int]] = {}
    for layer in layers:
        check_index("layer", layer, config.n_layer)
        heads[layer] = sorted(set(range(config.heads_of(layer)) if asked is None else asked))
        for head in heads[layer]:
            check_head(head, layer, config)
    return heads


async def _target(request: Request, body: ExplainBody, source_ids: list[int]) -> list[int]:
    """Return the target that was given, or else the model's likeliest, from its first token on."""
    served = served_model(request)
    if body.target is not None:
        given = await served.builder.tokenize_target(body.target, "target")
        return target_prefix(served.model_dir, body.target_language) + given
    options = RequestOptions(
        prompts=[source_ids],
        params=SamplingParams(max_tokens=0, temperature=0.0),
        max_tokens=None,
        default_max_tokens=0,  # the longest target
        seed=0,
        target=TargetOptions(target_language=body.target_language),
    )
    wanted = await served.builder.build(options, state_of(request.scope))
    longest = most_tokens(served.model_dir.config) - len(wanted.target_prefix)
    params = replace(wanted.params, max_tokens=min(wanted.params.max_tokens, longest))

    async def work() -> list[int]:
        async with served.complete(replace(wanted, params=params)) as completion:
            async for _ in completion.deltas():
                pass
            return completion.choices[0].sequence.token_ids

    return await unless_disconnected(request.receive, work())
