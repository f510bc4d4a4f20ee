"""Spans of requests, in an exporter that keeps them in memory."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import kvasir.server.process.tracing
from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.routes import ROUTES
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.errors import StartupError
from kvasir.server.process.tracing import make_provider
from tests.kit.fake_encoder import encoder_app, encoder_model_dir
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import EOS, MODEL, VOCAB_SIZE, running, serving, small_tokenizer

ENDPOINT = "http://collector.invalid:4318/v1/traces"
BODY = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    kept = InMemorySpanExporter()

    def make(endpoint: str, version: str) -> TracerProvider:
        assert endpoint == ENDPOINT
        return make_provider(endpoint, version, kept)

    monkeypatch.setattr(kvasir.server.process.tracing, "make_provider", make)
    return kept


def request_spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]


def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = request_spans(exporter)
    return span


def phases(exporter: InMemorySpanExporter) -> list[str]:
    """The names of the spans below the only request's, which follow each other without a gap."""
    span = only_span(exporter)
    below = [one for one in exporter.get_finished_spans() if one is not span]
    assert span.context is not None
    for one in below:
        assert one.parent is not None
        assert one.context is not None
        assert one.parent.span_id == span.context.span_id
        assert one.context.trace_id == span.context.trace_id
    times = [(one.start_time or 0, one.end_time or 0) for one in below]
    edges = [span.start_time or 0, *(at for pair in times for at in pair), span.end_time or 0]
    assert edges == sorted(edges)
    assert all(earlier[1] == later[0] for earlier, later in pairwise(times))
    return [one.name for one in below]


async def posted(
    exporter: InMemorySpanExporter,
    headers: Any = None,
    runner: FakeRunner | None = None,
    path: str = "/v1/completions",
    body: dict[str, Any] = BODY,
    **settings: Any,
) -> tuple[int, ReadableSpan]:
    """The status of a request, and its only span."""
    async with serving(runner, otlp_endpoint=ENDPOINT, **settings) as served:
        response = await served.client.post(path, json=body, headers=headers)
    return response.status_code, only_span(exporter)


def trace_ids_logged(caplog: pytest.LogCaptureFixture) -> list[str | None]:
    lines = [vars(one)["fields"] for one in caplog.records if one.getMessage() == "request"]
    return [fields.get("trace_id") for fields in lines]


TOKENS = {"input": [[5] * 9, [6] * 3]}


@pytest.mark.parametrize(
    ("labels", "asked"),
    [
        ((), [("/v1/embeddings", "embeddings", TOKENS)]),
        (
            ("relevant",),
            [
                ("/rerank", "rerank", {"query": "a", "texts": ["b", "c"]}),
                ("/v1/classify", "classify", TOKENS),
                ("/pooling", "pooling", TOKENS),
                ("/score", "score", {"text_1": "a", "text_2": "b"}),
                ("/predict", "classify", {"inputs": "a"}),
            ],
        ),
    ],
)
async def test_spans_and_log_have_the_tokens_of_an_encoders_request(
    exporter: InMemorySpanExporter,
    labels: tuple[str, ...],
    asked: list[tuple[str, str, dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvasir")
    app, runner = encoder_app(encoder_model_dir(labels), otlp_endpoint=ENDPOINT)
    n_tokens = list[int | None]()
    async with running(app) as client:
        for path, _, body in asked:
            runner.batches.clear()
            assert (await client.post(path, json=body)).status_code == 200
            n_tokens += [sum(len(text.prompt_ids) for text in runner.texts), None]
            assert (await client.post(path, json={})).status_code == 400
    spans = [dict(span.attributes or {}) for span in request_spans(exporter)]
    assert [span["gen_ai.operation.name"] for span in spans[::2]] == [one for _, one, _ in asked]
    assert [span.get("gen_ai.usage.input_tokens") for span in spans] == n_tokens
    lines = [vars(one)["fields"] for one in caplog.records if one.getMessage() == "request"]
    assert [one.get("prompt_tokens") for one in lines] == n_tokens


# These run no model.
UNTRACED = {"/tokenize", "/detokenize", "/explain", "/v1/messages/count_tokens", "/api/show"}
UNTRACED |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
UNTRACED |= {"/v1/models/load", "/v1/models/unload"}


async def test_every_route_with_a_body_that_runs_a_model_has_a_span(
    exporter: InMemorySpanExporter,
) -> None:
    paths = [one.path for one in ROUTES if isinstance(one, BodyRoute) and one.body_field]
    async with serving(otlp_endpoint=ENDPOINT) as served:
        for path in paths:
            await served.client.post(path, content=b"{")
    found = [(span.attributes or {})["http.route"] for span in request_spans(exporter)]
    assert found == [path for path in paths if path not in UNTRACED]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_below_its_callers(
    exporter: InMemorySpanExporter, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvasir")
    body = {"prompt": [5] * 9, "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": stream}
    headers = {"traceparent": PARENT, "x-request-id": "mine", "x-api-key": "secret"}
    status, span = await posted(exporter, headers, body=body, api_key="secret")
    assert status == 200
    assert span.name == f"text_completion {MODEL}"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    found: dict[str, Any] = dict(span.attributes or {})
    queued, first, whole = (
        found.pop(f"gen_ai.latency.{name}")
        for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queued <= first <= whole
    assert (span.end_time or 0) - (span.start_time or 0) == round(whole * 1e9)
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "enduser.id": "default",
        **({"gen_ai.request.stream": True} if stream else {}),
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert phases(exporter) == ["queue", "prefill", "decode"]
    assert trace_ids_logged(caplog) == [PARENT.split("-")[1]]


async def test_baggage_and_trace_state_are_not_read_and_not_logged(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ",".join(f"member {i}" for i in range(170))
    headers = {"traceparent": PARENT, "baggage": bad, "tracestate": bad}
    status, span = await posted(exporter, headers)
    assert status == 200
    assert span.parent is not None
    assert "member" not in caplog.text


async def test_unsampled_requests_and_other_routes_have_no_spans(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvasir")
    headers = {"traceparent": PARENT[:-2] + "00"}
    async with serving(otlp_endpoint=ENDPOINT) as served:
        await served.client.get("/model", headers=headers)
        await served.client.post("/tokenize", json={"prompt": "a"}, headers=headers)
        await served.client.post("/v1/completions", json=BODY, headers=headers)
    assert not exporter.get_finished_spans()
    assert trace_ids_logged(caplog) == [None, None, PARENT.split("-")[1]]


@pytest.mark.parametrize(
    ("settings", "path", "body", "status", "error"),
    [
        ({}, "/v1/completions", {"prompt": "a", "n": 99}, 400, "invalid_request_error"),
        ({}, "/generate", {"inputs": "a" * 999}, 400, "context_length_exceeded"),
        ({}, "/v1/completions", {"prompt": "a", "model": "b"}, 404, "model_not_found"),
        ({"max_body_bytes": 10}, "/", {"inputs": "a"}, 413, "request_too_large"),
        ({"api_key": "k"}, "/v1/chat/completions", {}, 401, "authentication_error"),
    ],
)
async def test_a_refused_request_has_a_span_with_the_reason(
    exporter: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    path: str,
    body: dict[str, Any],
    status: int,
    error: str,
) -> None:
    caplog.set_level(logging.INFO, "kvasir")
    headers, operation = {"traceparent": "none"}, "chat" if "chat" in path else "text_completion"
    _, span = await posted(exporter, headers, path=path, body=body, **settings)
    assert (span.name, span.parent) == (f"{operation} {MODEL}", None)
    found: dict[str, Any] = dict(span.attributes or {})
    assert found.pop("gen_ai.latency.e2e") > 0
    assert found.pop("gen_ai.request.id")
    assert found == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": MODEL,
        "http.route": path,
        "http.response.status_code": status,
        "error.type": error,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert phases(exporter) == []
    assert span.context is not None
    assert trace_ids_logged(caplog) == [f"{span.context.trace_id:032x}"]


NO_TRACES = [
    PARENT.upper(),
    PARENT.replace("-", " "),
    "ff" + PARENT[2:],
    f"00-{'0' * 32}-{'1' * 16}-01",
    PARENT + "-" + "a" * 9000,
    "\u00e9" * 55,
]


async def test_a_callers_trace_is_believed_only_in_the_standards_form(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvasir")
    async with serving(otlp_endpoint=ENDPOINT) as served:
        for given in NO_TRACES:
            headers = httpx.Headers({"traceparent": given}, encoding="latin-1")
            answer = await served.client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
    assert [span.parent for span in request_spans(exporter)] == [None] * len(NO_TRACES)
    logged = trace_ids_logged(caplog)
    assert len(logged) == len(NO_TRACES)
    assert all(re.fullmatch("[0-9a-f]{32}", trace_id or "") for trace_id in logged)


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_finish_reasons_are_the_protocols_words(
    exporter: InMemorySpanExporter, stream: bool
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "stream": stream}
    generate = "/generate_stream" if stream else "/generate"
    n_prompt = 0
    reply = [*small_tokenizer().encode(CALL).ids, EOS]

    def next_token(prefix: list[int]) -> int:
        nonlocal n_prompt
        n_prompt = n_prompt or len(prefix)
        return reply[min(len(prefix) - n_prompt, len(reply) - 1)]

    runner = FakeRunner(VOCAB_SIZE, next_token=next_token, max_model_len=256)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        for path, body in (
            ("/v1/chat/completions", chat),
            (generate, {"inputs": "a"}),
            ("/api/chat", chat),
        ):
            n_prompt = 0
            assert (await served.client.post(path, json=body)).status_code == 200
    found = [span.attributes or {} for span in request_spans(exporter)]
    assert [one["gen_ai.operation.name"] for one in found] == ["chat", "text_completion", "chat"]
    reasons = [one["gen_ai.response.finish_reasons"] for one in found]
    assert reasons == [("tool_calls",), ("eos_token",), ("stop",)]
    assert {one.get("gen_ai.request.stream", False) for one in found} == {stream}


def ending(span: ReadableSpan) -> tuple[Any, ...]:
    """The status, the error and the finish reasons of a request that failed."""
    assert span.status.status_code is StatusCode.ERROR
    found = span.attributes or {}
    names = ("http.response.status_code", "error.type", "gen_ai.response.finish_reasons")
    return tuple(found.get(name) for name in names)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine_ends_all_choices(
    exporter: InMemorySpanExporter, stream: bool
) -> None:
    runner = FakeRunner(VOCAB_SIZE)
    runner.error = RuntimeError("gone")
    body = {"prompt": "a", "n": 2, "stream": stream}
    status, span = await posted(exporter, runner=runner, body=body)
    assert (status, *ending(span)) == (500, 500, "internal_error", ("error", "error"))


async def test_a_stream_that_fails_after_its_first_token_is_an_error(
    exporter: InMemorySpanExporter,
) -> None:
    def fail_after_three(prefix: list[int]) -> None:
        if len(prefix) == 5 + 3:
            runner.error = RuntimeError("gone")

    runner = FakeRunner(VOCAB_SIZE, next_token=fail_after_three)
    body = {"prompt": [5] * 5, "ignore_eos": True, "stream": True}
    _, span = await posted(exporter, runner=runner, body=body)
    assert ending(span) == (200, "internal_error", ("error",))
    assert phases(exporter) == ["queue", "prefill", "decode"]


async def test_requests_that_wait_or_run_when_they_end_are_errors(
    exporter: InMemorySpanExporter,
) -> None:
    """By a disconnect, by a deadline in the queue, and by a drain before they are accepted."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.hold()
        cancelled, late = (
            asyncio.create_task(served.client.post("/v1/completions", json=BODY)) for _ in range(2)
        )
        for _ in range(2):
            await served.submitted.acquire()
        served.model.engine.abort([max(served.model.engine._live)], FinishReason.TIMEOUT)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        runner.release()
        assert (await late).status_code == 504
        await served.model.drain()
        await served.client.post("/v1/completions", json=BODY)
    spans = {ending(span): span for span in request_spans(exporter)}
    assert set(spans) == {
        (None, "abort", ("abort",)),
        (504, "deadline_exceeded", ("timeout",)),
        (503, "unavailable", None),
    }
    queued = spans[504, "deadline_exceeded", ("timeout",)]
    below = [one for one in exporter.get_finished_spans() if one.parent == queued.context]
    assert [one.name for one in below] == ["queue"]


def test_the_environment_can_rename_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def attributes() -> dict[str, Any]:
        return dict(make_provider(ENDPOINT, "1.2", InMemorySpanExporter()).resource.attributes)

    assert attributes().items() >= {"service.name": "kvasir", "service.version": "1.2"}.items()
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=9"
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    expected = {"service.name": "mine", "service.version": "9", "telemetry.sdk.language": "python"}
    expected["deployment.environment.name"] = "test"
    assert attributes().items() >= expected.items()


async def test_without_the_sdk_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kvasir.server.process, "tracing")
    monkeypatch.delitem(sys.modules, "kvasir.server.process.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"otlp_endpoint needs opentelemetry.*\[cpu,otel\]"):
        async with serving(otlp_endpoint=ENDPOINT):
            pass
