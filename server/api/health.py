"""Health, metrics, version, and the sequences that share the engine now."""

from __future__ import annotations

from importlib.metadata import version
from time import perf_counter
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from kvasir.server.api.http.responses import MODEL_ERRORS, OPEN, NamedModel, models_of
from kvasir.server.api.schemas import ResponseBody, Size
from kvasir.server.engine.sequence import SequenceStatus
from kvasir.server.requests.registry import ModelState
from kvasir.server.requests.served_model import ServedModel, onnxruntime_version
from kvasir.server.telemetry.server_metrics import CONTENT_TYPE

router = APIRouter()


class Health(ResponseBody):
    """The answer to a probe."""

    status: Literal["ok", "unavailable"]
    models: dict[str, ModelState] | None = Field(
        None, description="The state of each model, where several are served."
    )


class RunningModel(ResponseBody):
    """A model, and what computes it."""

    model: str
    precision: str
    device: str
    kernels: str | None = Field(
        description="The instructions that Kvasir's own operators use; null for stock operators, "
        "and while the model loads."
    )
    speculate: bool | None = Field(
        description="True if text is drafted; null while the model loads."
    )


class Version(RunningModel):
    """The software and the model."""

    version: str
    onnxruntime: str | None
    models: list[RunningModel] = Field(description="All models but those that failed to load.")


class BatchedSequence(ResponseBody):
    """A sequence that has not ended."""

    request_id: str
    sequence_id: Size
    state: Literal["waiting", "prefilling", "running"]
    row: Size | None
    prompt_tokens: Size
    cached_tokens: Size
    computed_tokens: Size = Field(description="Tokens in the KV cache.")
    generated_tokens: Size
    max_tokens: Size
    seconds: float = Field(description="Time since it arrived.")


class RunningBatch(ResponseBody):
    """The sequences that share the engine."""

    max_num_seqs: Size
    sequences: list[BatchedSequence]


class PromptStep(ResponseBody):
    """The part of a prompt that a step computed."""

    sequence_id: Size
    start: Size = Field(description="Its tokens before.")
    tokens: Size
    prompt_tokens: Size = Field(description="All of its tokens.")
    waited: float = Field(description="Seconds from its arrival to the begin of the step.")


class Step(ResponseBody):
    """A step of the engine."""

    ago: float = Field(description="Seconds since it began.")
    seconds: float
    prompts: list[PromptStep]
    streams: list[Size] = Field(description="The ids of sequences that got tokens.")


class Steps(ResponseBody):
    """The last steps of the engine, the oldest first."""

    steps: list[Step]


class Metrics(Response):
    """Metrics in Prometheus' text format, or in OpenMetrics."""

    media_type = CONTENT_TYPE


_UNAVAILABLE = {503: {"description": "The server is not in that state.", "model": Health}}
_PROBE = OPEN | {"response_model": Health, "responses": OPEN["responses"] | _UNAVAILABLE}


@router.head("/health", **_PROBE)
@router.get("/health", **_PROBE)
@router.head("/health/ready", **_PROBE)
@router.get("/health/ready", **_PROBE)
async def ready(request: Request) -> Response:
    """Return 200 if requests are accepted, even with a full queue, which answers with 429.

    Of several models none may be loading but those of `models_dir`, and one must accept requests.
    """
    models = models_of(request.scope)
    states, staying = models.states, models.staying_states.values()
    accepts = not {"ready", "unloaded"}.isdisjoint(states.values())
    return _health(states, is_good=accepts and "loading" not in staying)


@router.head("/health/live", **_PROBE)
@router.get("/health/live", **_PROBE)
async def live(request: Request) -> Response:
    """Return 200 unless an engine has failed or hangs; also while models load."""
    states = models_of(request.scope).states
    return _health(states, is_good="unhealthy" not in states.values())


@router.head("/health/startup", **_PROBE)
@router.get("/health/startup", **_PROBE)
async def startup(request: Request) -> Response:
    """Return 200 once the models have been loaded and warmed up, or some of them have failed."""
    models = models_of(request.scope)
    states, staying = models.states, models.staying_states.values()
    return _health(states, is_good="loading" not in staying and {*states.values()} != {"failed"})


def _health(states: dict[str, ModelState], *, is_good: bool) -> Response:
    body: dict[str, Any] = {"status": "ok" if is_good else "unavailable"}
    if len(states) > 1:
        body["models"] = states
    return JSONResponse(body, 200 if is_good else 503)


@router.head("/metrics", response_class=Metrics, **OPEN)
@router.get("/metrics", response_class=Metrics, **OPEN)
async def metrics(request: Request) -> Metrics:
    """Return all metrics, for Prometheus."""
    return _metrics(request)


@router.head("/metrics/router", response_class=Metrics, **OPEN)
@router.get("/metrics/router", response_class=Metrics, **OPEN)
async def router_metrics(request: Request) -> Metrics:
    """Return the load in three gauges, and the prefix cache, for load balancers."""
    return _metrics(request, only_load=True)


def _metrics(request: Request, *, only_load: bool = False) -> Metrics:
    accept = request.headers.get("accept", "")
    content, kind = models_of(request.scope).metrics.render(accept, only_load=only_load)
    return Metrics(content, headers={"content-type": kind, "vary": "accept"})


@router.get("/version", responses=MODEL_ERRORS)
async def versions(request: Request, served: NamedModel) -> Version:
    """Return the versions of the software and of each model."""
    return Version(
        **_running(served),
        version=version("kvasir-lm"),
        onnxruntime=onnxruntime_version(),
        models=[RunningModel(**_running(one)) for one in models_of(request.scope).usable],
    )


def _running(served: ServedModel) -> dict[str, Any]:
    return served.describe_model() | {"kernels": served.kernels, "speculate": served.speculates}


@router.get("/debug/batch", responses=MODEL_ERRORS)
async def batch(served: NamedModel) -> RunningBatch:
    """Return the sequences that share the engine now, without text.

    The engine's thread changes them meanwhile, and the values need not agree. A snapshot between
    two steps would, but an engine that hangs, which is when this is needed, never takes one.
    """
    now = perf_counter()
    sequences = [
        BatchedSequence(
            request_id=sequence.request_id,
            sequence_id=sequence.id,
            state=status.value,
            row=sequence.row,
            prompt_tokens=len(sequence.prompt_ids),
            cached_tokens=sequence.n_cached,
            computed_tokens=sequence.n_computed,
            generated_tokens=len(sequence.output_ids),
            max_tokens=sequence.params.max_tokens,
            seconds=round(now - sequence.arrived_at, 3),
        )
        for sequence in served.engine.sequences
        if (status := sequence.status) is not SequenceStatus.FINISHED
    ]
    return RunningBatch(max_num_seqs=served.settings.max_num_seqs, sequences=sequences)


@router.get("/debug/steps", response_model=Steps, responses=MODEL_ERRORS)
def steps(served: NamedModel) -> Response:  # no coroutine: there are thousands
    """Return what the last 4,096 steps computed and when, of all keys' requests, without text."""
    now = perf_counter()
    made = [
        {
            "ago": round(now - step.started, 6),
            "seconds": round(step.seconds, 6),
            "prompts": [
                {
                    "sequence_id": part.sequence_id,
                    "start": part.start,
                    "tokens": part.n_computed,
                    "prompt_tokens": part.n_tokens,
                    "waited": round(step.started - part.arrived_at, 6),
                }
                for part in step.prompts
            ],
            "streams": step.streams,
        }
        for step in list(served.metrics.steps)
    ]
    lines = b",".join(map(to_json, made))  # one by one: other threads go on between them
    return Response(b'{"steps":[' + lines + b"]}", media_type="application/json")
