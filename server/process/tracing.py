"""OpenTelemetry: a span for each accepted request, sent by OTLP.

The SDK is imported only where an endpoint is set. A span is made when its request has ended, from
the times that the request has recorded. Most names are those of OpenTelemetry's semantic
conventions for generative AI and HTTP; `llm_request`, `gen_ai.request.id` and `gen_ai.latency.*`
are vLLM's, whose spans are similar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, perf_counter, time_ns

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.engine.sequence import FinishReason
from server.requests.completion import RequestState

_LOG_SECONDS = 60.0  # between two lines of one kind about the collector
_TRACE_CONTEXT = TraceContextTextMapPropagator()  # and no baggage: nothing here reads it
_BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})


def request_spans(app: ASGIApp, provider: TracerProvider, model: str) -> ASGIApp:
    """Send the span of each accepted request when it ends.

    A caller's `traceparent` header makes its span the parent (W3C Trace Context).
    """
    tracer = provider.get_tracer("kvasir")

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting_status)
        finally:
            _send_span(tracer, model, scope, status)

    return run


def _send_span(tracer: Tracer, model: str, scope: Scope, status: int | None) -> None:
    """Send a request's span if it was accepted; status is None without a response."""
    state: RequestState | None = scope.get("state", {}).get("request")
    completion = state.completion if state else None
    if state is None or completion is None:
        return
    seconds, ended = perf_counter() - state.arrived, time_ns()
    is_chat = scope["path"].endswith("/chat/completions")
    sequences = [choice.sequence for choice in completion.choices]
    queued = [s.scheduled_at - s.arrived_at for s in sequences if s.scheduled_at is not None]
    reasons = [choice.finish_reason or FinishReason.ABORT for choice in completion.choices]
    attributes = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": model,
        "gen_ai.request.id": state.id,
        "gen_ai.usage.input_tokens": completion.n_prompt_tokens,
        "gen_ai.usage.output_tokens": completion.n_completion_tokens,
        "gen_ai.response.finish_reasons": tuple(reasons),
        "gen_ai.latency.e2e": seconds,
        "gen_ai.latency.time_in_queue": min(queued, default=None),
        "gen_ai.latency.time_to_first_token": completion.seconds_to_first_token,
        "enduser.id": state.caller.name or None,
        "http.route": scope["path"],
        "http.response.status_code": status,
    }
    span = tracer.start_span(
        "llm_request",
        _TRACE_CONTEXT.extract(Headers(scope=scope)),
        kind=SpanKind.SERVER,
        start_time=ended - round(seconds * 1e9),
        attributes={name: value for name, value in attributes.items() if value is not None},
    )
    if failed := [reason for reason in reasons if reason in _BAD_ENDS or (status or 0) >= 500]:
        span.set_attribute("error.type", failed[0])
        span.set_status(Status(StatusCode.ERROR, "the request did not run to its end"))
    span.end(ended)


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
    logging.getLogger(TraceState.__module__).setLevel(logging.ERROR)
    # Attributes given to create() would otherwise replace those of the environment.
    environment = OTELResourceDetector().detect().attributes
    service = {"service.name": "kvasir", "service.version": version}
    # The application shuts the provider down, and waits less than the SDK would.
    resource = Resource.create({**service, **environment})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
