"""Spans of requests, in an exporter that keeps them in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import server.process.tracing
from server.engine.sequence import FinishReason
from server.process.tracing import make_provider
from tests.fake_runner import FakeRunner
from tests.serving import MODEL, VOCAB_SIZE, serving

ENDPOINT = "http://collector.invalid:4318/v1/traces"
BODY = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    kept = InMemorySpanExporter()

    def make(endpoint: str, version: str) -> TracerProvider:
        assert endpoint == ENDPOINT
        return make_provider(endpoint, version, kept)

    monkeypatch.setattr(server.process.tracing, "make_provider", make)
    return kept


def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_below_its_callers(
    exporter: InMemorySpanExporter, stream: bool
) -> None:
    body = {"prompt": [5] * 9, "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": stream}
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    headers["x-api-key"] = "secret"
    async with serving(otlp_endpoint=ENDPOINT, api_key="secret") as served:
        response = await served.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    span = only_span(exporter)
    assert span.name == "llm_request"
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
        "gen_ai.response.finish_reasons": ("length", "length"),
        "enduser.id": "default",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_baggage_and_trace_state_are_not_read_and_not_logged(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ",".join(f"member {i}" for i in range(170))
    headers = {"traceparent": PARENT, "baggage": bad, "tracestate": bad}
    async with serving(otlp_endpoint=ENDPOINT) as served:
        response = await served.client.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 200
    assert only_span(exporter).parent is not None
    assert "member" not in caplog.text


async def test_only_accepted_and_sampled_requests_have_spans(
    exporter: InMemorySpanExporter,
) -> None:
    async with serving(otlp_endpoint=ENDPOINT) as served:
        await served.client.post("/v1/completions", json={"prompt": "a", "n": 99})
        await served.client.get("/health/ready")
        for parent in (PARENT[:-2] + "00", PARENT):
            headers = {"traceparent": parent}
            await served.client.post("/v1/completions", json=BODY, headers=headers)
    assert only_span(exporter).parent is not None


async def test_a_chat_has_an_operation_of_its_own(exporter: InMemorySpanExporter) -> None:
    async with serving(otlp_endpoint=ENDPOINT) as served:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert (await served.client.post("/v1/chat/completions", json=body)).status_code == 200
    assert (only_span(exporter).attributes or {})["gen_ai.operation.name"] == "chat"


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
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.error = RuntimeError("gone")
        body = {"prompt": "a", "n": 2, "stream": stream}
        assert (await served.client.post("/v1/completions", json=body)).status_code == 500
    assert ending(only_span(exporter)) == (500, "error", ("error", "error"))


async def test_a_deadline_that_passes_in_the_queue_is_a_timeout(
    exporter: InMemorySpanExporter,
) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.hold()
        first, late = (
            asyncio.create_task(served.client.post("/v1/completions", json=BODY)) for _ in range(2)
        )
        for _ in range(2):
            await served.submitted.acquire()
        served.service.engine.abort([max(served.service.engine._live)], FinishReason.TIMEOUT)
        runner.release()
        assert ((await first).status_code, (await late).status_code) == (200, 504)
    good, bad = sorted(
        exporter.get_finished_spans(), key=lambda span: span.status.status_code.value
    )
    assert ending(bad) == (504, "timeout", ("timeout",))
    assert good.status.status_code is StatusCode.UNSET


async def test_a_disconnect_is_an_error(exporter: InMemorySpanExporter) -> None:
    runner = FakeRunner(VOCAB_SIZE)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.hold()
        cancelled = asyncio.create_task(served.client.post("/v1/completions", json={"prompt": "a"}))
        await served.submitted.acquire()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        runner.release()
    assert ending(only_span(exporter)) == (None, "abort", ("abort",))


def test_the_environment_can_rename_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def attributes() -> dict[str, Any]:
        return dict(make_provider(ENDPOINT, "1.2", InMemorySpanExporter()).resource.attributes)

    assert attributes().items() >= {"service.name": "kvasir", "service.version": "1.2"}.items()
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=9"
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    expected = {
        "service.name": "mine",
        "service.version": "9",
        "deployment.environment.name": "test",
    }
    assert attributes().items() >= expected.items()
    assert attributes()["telemetry.sdk.language"] == "python"


def test_the_sdk_is_needed_only_where_an_endpoint_is_set() -> None:
    code = (
        "import sys, asyncio; sys.modules['opentelemetry.sdk'] = None\n"
        "from tests.serving import serving\n"
        "async def main():\n"
        "    async with serving() as served:\n"
        "        body = {'prompt': 'a'}\n"
        "        print((await served.client.post('/v1/completions', json=body)).status_code)\n"
        f"    async with serving(otlp_endpoint={ENDPOINT!r}):\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "200\n"
    error = done.stderr.splitlines()[-1]
    assert error.startswith("server.errors.StartupError: otlp_endpoint needs opentelemetry")
    assert "[cpu,otel]" in error
