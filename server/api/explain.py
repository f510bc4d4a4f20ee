"""POST /explain: what the model attends to in a text, and what it would say next."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import sleep

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from pydantic_core import to_json
from starlette.responses import Response

from model.bundle import ModelBundle
from server.api.openai.answers import check_model
from server.api.responses import json_response, service_of, unless_disconnected
from server.api.schemas import Body, Count, parse
from server.errors import InvalidRequestError, OverloadedError
from server.explain import Explainer, Explanation, check_index, check_length

router = APIRouter()

MAX_WEIGHTS = 2**20  # in an answer, some 12 bytes each: four heads' maps of 512 tokens
# Explanations that run or wait. Who changes their mind leaves one that runs on, and may be here again before the server
# has noticed that the one after it is not wanted any more.
_MAX_INSIDE = 4
_THREADS = 1  # what runs beside the engine is to leave it the other processors
_NICENESS = 10  # and where all are busy, to take a tenth of what it takes


class ExplainBody(Body):
    """POST /explain. `text` may be called `prompt`; layers and heads are counted from 0, and no heads are all."""

    model: str | None = Field(None, description="The served model's name; another is 404.")
    text: str | None = Field(None, description="What the model is to read.")
    prompt: str | None = Field(None, description="Another name for `text`.")
    layers: list[Count] = Field([0], min_length=1, description="Which layers' attention, from 0.")
    heads: list[Count] | None = Field(
        None, min_length=1, description="Which of their heads, from 0. Default: all."
    )
    top_k: int = Field(10, ge=0, le=1000, description="How many of the likeliest next tokens.")

    @model_validator(mode="after")
    def _one_text(self) -> ExplainBody:
        if (self.text is None) == (self.prompt is None):
            raise ValueError("give either text or prompt; they are the same")
        return self

    @property
    def source(self) -> str:
        return self.text or self.prompt or ""


def _give_way() -> None:
    """Let the engine and the event loop go first, which share processors with this thread."""
    if (
        sys.platform == "linux"
    ):  # where niceness is a thread's own; elsewhere it is the whole process's
        os.nice(_NICENESS)


class Explanations:
    """The explainer of a server, loaded when it is first asked, in a thread that takes one explanation at a time.

    It holds the model's weights a second time from then on.
    """

    def __init__(self, bundle: ModelBundle) -> None:
        self._bundle = bundle
        self._explainer: Explainer | None = None
        self._thread = ThreadPoolExecutor(1, "explain", initializer=_give_way)
        self._n_inside = 0

    async def answer(
        self, token_ids: list[int], layers: list[int], heads: list[int], top_k: int
    ) -> bytes:
        """The JSON of an explanation. Raises OverloadedError where others are before it."""
        if self._n_inside >= _MAX_INSIDE:
            raise OverloadedError("other texts are being explained; try again", retry_after=1)
        self._n_inside += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._explain, token_ids, layers, heads, top_k
        )
        # A client that left makes room: of what it asked, no more runs than it has begun.
        work.add_done_callback(self._leave)
        return await work

    def _leave(self, _work: asyncio.Future[bytes]) -> None:
        self._n_inside -= 1

    def _explain(
        self, token_ids: list[int], layers: list[int], heads: list[int], top_k: int
    ) -> bytes:
        if self._explainer is None:
            self._explainer = Explainer(self._bundle, _THREADS)
        explanation = self._explainer.explain_tokens(token_ids, layers, top_k=top_k)
        return b"".join(_json(explanation, heads))


@router.post("/explain")
async def explain(request: Request) -> Response:
    service = service_of(request)
    body = parse(ExplainBody, await request.body())
    check_model(service, body.model)
    service.admission.check_open()
    config = service.bundle.config
    layers = sorted(set(body.layers))
    heads = sorted(set(range(config.n_head) if body.heads is None else body.heads))
    for layer in layers:
        check_index("layer", layer, config.n_layer)
    for head in heads:
        check_index("head", head, config.n_head)
    prompt = await service.prompt(body.source)
    n_tokens = len(prompt.ids)
    check_length(n_tokens, config)
    n_weights = len(layers) * len(heads) * n_tokens**2
    if n_weights > MAX_WEIGHTS:
        raise InvalidRequestError(
            f"{len(layers)} layers and {len(heads)} heads of {n_tokens} tokens are {n_weights} weights, more than "
            f"the {MAX_WEIGHTS} that an answer may have; ask for fewer heads or layers, or of a shorter text",
            param="heads",
        )
    explanations: Explanations = request.app.state.explanations
    work = explanations.answer(prompt.ids, layers, heads, body.top_k)
    return json_response(await unless_disconnected(request.receive, work))


def _json(explanation: Explanation, heads: list[int]) -> Iterator[bytes]:
    """Row by row; in between, the interpreter is the engine's and the streams' at once, not after its 5 ms."""
    known = {
        "tokens": explanation.tokens,
        "token_ids": explanation.token_ids,
        "next_tokens": explanation.next_tokens,
    }
    yield to_json(known)[:-1] + b',"attention":['
    for i, (layer, head) in enumerate(product(explanation.weights, heads)):
        yield b'%s{"layer":%d,"head":%d,"weights":[' % (b"," if i else b"", layer, head)
        for row, weights in enumerate(explanation.weights[layer][head]):
            sleep(0)
            yield (b"," if row else b"") + to_json(weights.tolist())
        yield b"]}"
    yield b"]}"
