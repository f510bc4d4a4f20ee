"""OpenTelemetry: a span for each accepted request, sent by OTLP.

The SDK is imported, and anything of this runs, only where an endpoint is set. A span is made when its request has
ended, from the times that the request carries anyway. Names are the semantic conventions' for generative AI.
"""

from __future__ import annotations

import logging
from time import monotonic, perf_counter, time_ns

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.completion import Completion
from server.engine.sequence import FinishReason

_QUIET = 60.0  # seconds until the log says again what ails the collector
_BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR, None})


class Tracing:
    """Middleware. A caller's `traceparent` header makes its span the parent (W3C Trace Context)."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model: str) -> None:
        self.app = app
        self._tracer = provider.get_tracer("kvasir")
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            completion: Completion | None = scope.get("state", {}).get("completion")
            if completion is not None:
                self._record(scope, completion)

    def _record(self, scope: Scope, completion: Completion) -> None:
        now, ended = perf_counter(), time_ns()
        seconds = now - scope["state"]["arrived"]
        times = [choice.sequence.times for choice in completion.choices]
        reasons = [choice.finish_reason for choice in completion.choices]
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": scope["state"]["request_id"],
            "gen_ai.usage.input_tokens": completion.n_prompt_tokens,
            "gen_ai.usage.output_tokens": completion.n_completion_tokens,
            "gen_ai.response.finish_reasons": tuple(reason or "abort" for reason in reasons),
            "gen_ai.latency.e2e": seconds,
            "http.route": scope["path"],
        }
        scheduled = [t.scheduled - t.arrived for t in times if t.scheduled is not None]
        if scheduled:
            attributes["gen_ai.latency.time_in_queue"] = min(scheduled)
        if completion.seconds_to_first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = completion.seconds_to_first_token
        span = self._tracer.start_span(
            "llm_request",
            extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            start_time=ended - round(seconds * 1e9),
            attributes=attributes,
        )
        if _BAD_ENDS.intersection(reasons):
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


def make_provider(endpoint: str, version: str, exporter: SpanExporter | None = None) -> TracerProvider:
    """Spans go to `endpoint`, such as http://collector:4318/v1/traces, in batches and from a thread of their own."""
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        exporter = OTLPSpanExporter(endpoint)
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(Seldom())
    resource = Resource.create({"service.name": "kvasir", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # the application does it, and waits less
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
