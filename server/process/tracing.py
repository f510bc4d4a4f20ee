"""OpenTelemetry: the spans of each request for text, vectors or scores, sent by OTLP.

The SDK is imported only where an endpoint is set. Spans are made when their request has ended, from
the times that the request has recorded. Most names are those of OpenTelemetry's semantic
conventions for generative AI and HTTP; `gen_ai.request.id` and `gen_ai.latency.*` are vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from time import monotonic, perf_counter, time_ns
from typing import Any

from fastapi.routing import APIRoute
from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.server.api.http.body import TextRoute, VectorRoute
from kvasir.server.api.http.responses import path_of, state_of
from kvasir.server.api.routes import ROUTES
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.completion import Completion

_Phase = tuple[str, float, float]  # its name, start and end, in seconds of `perf_counter`
_LOG_SECONDS = 60.0  # between two lines of one kind about the collector
_TRACE_CONTEXT = TraceContextTextMapPropagator()  # and no baggage: nothing here reads it
_DEADLINE = 504  # which every route that runs a model may answer, and no other
_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")
_OTHER_NAMES = dict.fromkeys(_CHATS, "chat")
_OTHER_NAMES["/predict"] = "classify"


def _operation(route: APIRoute) -> str:
    """Return the name of what a route does: an operation of the conventions, or its path's end."""
    kinds = ((TextRoute, "text_completion"), (VectorRoute, "embeddings"))
    of_kind = next((name for kind, name in kinds if isinstance(route, kind)), None)
    return _OTHER_NAMES.get(route.path) or of_kind or route.path.rpartition("/")[2]


_OPERATIONS = {route.path: _operation(route) for route in ROUTES if _DEADLINE in route.responses}


def request_spans(app: ASGIApp, provider: TracerProvider, model: str) -> ASGIApp:
    """Send the spans of each such request when it ends, and set its state's `trace_id`.

    model: the name of requests that end before their model is known.
    A caller's `traceparent` header makes its span the parent (W3C Trace Context).
    """
    tracer = provider.get_tracer("kvasir")

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(path_of(scope))
        if operation is None or scope.get("method") != "POST":
            await app(scope, receive, send)
            return
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvasir",
            "http.route": scope["path"],
        }

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                attributes["http.response.status_code"] = message["status"]
                kind = Headers(raw=message["headers"]).get("content-type", "")
                if kind.startswith(("text/event-stream", "application/x-ndjson")):
                    attributes["gen_ai.request.stream"] = True
            await send(message)

        try:
            await app(scope, receive, send_and_note)
        finally:
            attributes["gen_ai.request.model"] = state_of(scope).model or model
            _send_spans(tracer, scope, attributes)

    return run


def _send_spans(tracer: trace.Tracer, scope: Scope, attributes: dict[str, Any]) -> None:
    """Send a request's span, and below it those of its phases if it was accepted."""
    state = state_of(scope)
    status = attributes.get("http.response.status_code")
    error, phases = state.error or ("abort" if status is None else None), list[_Phase]()
    if (completion := state.completion) is not None:
        phases = _phases(completion)
        _, arrived, left_queue = phases[0]
        reasons = [
            choice.shown_reason or choice.finish_reason or FinishReason.ABORT
            for choice in completion.choices
        ]
        if error is None and FinishReason.ABORT in reasons:
            error = "abort"
        attributes |= {
            "gen_ai.usage.input_tokens": completion.n_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": completion.n_cached_tokens,
            "gen_ai.usage.output_tokens": completion.n_completion_tokens,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.latency.time_in_queue": left_queue - arrived if phases[1:] else None,
            "gen_ai.latency.time_to_first_token": completion.seconds_to_first_token,
        }
    if state.n_embedded is not None:
        attributes["gen_ai.usage.input_tokens"] = state.n_embedded
    now, now_ns = perf_counter(), time_ns()
    attributes |= {
        "gen_ai.request.id": state.id,
        "gen_ai.latency.e2e": now - state.arrived,
        "error.type": error,
        "enduser.id": state.caller.name or None,
    }

    def ns(moment: float) -> int:
        return now_ns - round((now - moment) * 1e9)

    span = tracer.start_span(
        f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
        _TRACE_CONTEXT.extract(Headers(scope=scope)),
        kind=trace.SpanKind.SERVER,
        start_time=ns(state.arrived),
        attributes={name: value for name, value in attributes.items() if value is not None},
    )
    state.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    for name, start, end in phases:
        phase = tracer.start_span(name, trace.set_span_in_context(span), start_time=ns(start))
        phase.end(ns(end))
    # Of a server's span HTTP's conventions say: a client's mistake is no error of the server.
    if error is not None and not 400 <= (status or 0) < 500:
        span.set_status(trace.StatusCode.ERROR, "the request did not run to its end")
    span.end(now_ns)


def _phases(completion: Completion) -> list[_Phase]:
    """Return the phases that a request reached; the first of its sequences in each counts."""
    sequences = [choice.sequence for choice in completion.choices]
    moments: list[float] = []
    for name in ("arrived_at", "scheduled_at", "first_token_at"):
        times = [at for sequence in sequences if (at := getattr(sequence, name)) is not None]
        if not times:  # the engine may still run what was aborted, so later ones may be known
            break
        moments.append(min(times))
    moments.append(max(sequence.finished_at or perf_counter() for sequence in sequences))
    names = ("queue", "prefill", "decode")
    return [(name, *ends) for name, ends in zip(names, pairwise(moments), strict=False)]


def _once_a_minute() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that passes each kind of message once a minute: exporters log every try."""
    passed_at: dict[str, float] = {}

    def is_due(record: logging.LogRecord) -> bool:
        now = monotonic()
        if now - passed_at.get(record.msg, -_LOG_SECONDS) < _LOG_SECONDS:
            return False
        passed_at[record.msg] = now
        return True

    return is_due


def make_provider(
    endpoint: str, version: str, exporter: SpanExporter | None = None
) -> TracerProvider:
    """Return a provider that sends spans, in batches from a thread, to such as http://…/v1/traces.

    The SDK reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which describe the service.
    """
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415

        exporter = trace_exporter.OTLPSpanExporter(endpoint)
        logging.getLogger(trace_exporter.__name__).addFilter(_once_a_minute())
    # Its warnings quote what callers sent.
    logging.getLogger(trace.TraceState.__module__).setLevel(logging.ERROR)
    # Attributes given to create() would otherwise replace those of the environment.
    environment = OTELResourceDetector().detect().attributes
    service = {"service.name": "kvasir", "service.version": version}
    # The application shuts the provider down, and waits less than the SDK would.
    resource = Resource.create({**service, **environment})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
