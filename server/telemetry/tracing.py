"""OpenTelemetry: a span for each accepted request, sent by OTLP.

The SDK is imported, and anything of this runs, only where an endpoint is set. A span is made when its request has
ended, from the times that the request carries anyway. Most names are those of OpenTelemetry's semantic conventions for
generative AI and HTTP; `llm_request`, `gen_ai.request.id` and `gen_ai.latency.*` are vLLM's, which has spans alike.
"""

from __future__ import annotations

import logging
from time import monotonic, perf_counter, time_ns

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.engine.sequence import FinishReason
from server.requests.completion import Completion, RequestState

_QUIET = 60.0  # seconds until the log says again what ails the collector
_TRACE_CONTEXT = TraceContextTextMapPropagator()  # and no baggage: nothing here reads it
_BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})


class Tracing:
    """Middleware. A caller's `traceparent` header makes its span the parent (W3C Trace Context)."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model: str) -> None:
        self.app = app
        self._tracer = provider.get_tracer("kvasir")
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            state: RequestState | None = scope.get("state", {}).get("request")
            if state is not None and state.completion is not None:
                self._record(scope, state, state.completion, status)

    def _record(
        self, scope: Scope, state: RequestState, completion: Completion, status: int | None
    ) -> None:
        """status: None where the client left before an answer began."""
        now, ended = perf_counter(), time_ns()
        seconds = now - state.arrived
        times = [choice.sequence.times for choice in completion.choices]
        reasons = [choice.finish_reason or FinishReason.ABORT for choice in completion.choices]
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.operation.name": "chat"
            if scope["path"].endswith("/chat/completions")
            else "text_completion",
            "gen_ai.provider.name": "kvasir",
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": state.id,
            "gen_ai.usage.input_tokens": completion.n_prompt_tokens,
            "gen_ai.usage.output_tokens": completion.n_completion_tokens,
            "gen_ai.response.finish_reasons": tuple(reasons),
            "gen_ai.latency.e2e": seconds,
            "http.route": scope["path"],
        }
        if status is not None:
            attributes["http.response.status_code"] = status
        scheduled = [t.scheduled - t.arrived for t in times if t.scheduled is not None]
        if scheduled:
            attributes["gen_ai.latency.time_in_queue"] = min(scheduled)
        if completion.seconds_to_first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = completion.seconds_to_first_token
        span = self._tracer.start_span(
            "llm_request",
            _TRACE_CONTEXT.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            start_time=ended - round(seconds * 1e9),
            attributes=attributes,
        )
        if failed := [reason for reason in reasons if reason in _BAD_ENDS or (status or 0) >= 500]:
            span.set_attribute("error.type", failed[0])
            span.set_status(Status(StatusCode.ERROR, "the request did not run to its end"))
        span.end(ended)


class Seldom(logging.Filter):
    """Passes each kind of message once a minute: exporters say of every attempt that it failed."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        if now - self._said.get(record.msg, -_QUIET) < _QUIET:
            return False
        self._said[record.msg] = now
        return True


def make_provider(
    endpoint: str, version: str, exporter: SpanExporter | None = None
) -> TracerProvider:
    """Spans go to `endpoint`, such as http://collector:4318/v1/traces, in batches and from a thread of their own.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which the SDK reads, say more of the service, or call it otherwise.
    """
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        exporter = OTLPSpanExporter(endpoint)
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(Seldom())
    logging.getLogger(TraceState.__module__).setLevel(
        logging.ERROR
    )  # its warnings quote what callers sent
    told = (
        OTELResourceDetector().detect().attributes
    )  # beside attributes given to create() the SDK would drop these
    resource = Resource.create({"service.name": "kvasir", "service.version": version, **told})
    provider = TracerProvider(
        resource=resource, shutdown_on_exit=False
    )  # the application does it, and waits less
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
