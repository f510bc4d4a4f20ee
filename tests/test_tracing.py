"""Spans of requests, in an exporter that keeps them in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import server.tracing
from server.tracing import make_provider
from tests.fake_runner import FakeRunner
from tests.serving import MODEL, VOCAB_SIZE, serving

ENDPOINT = "http://collector.invalid:4318/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    kept = InMemorySpanExporter()

    def make(endpoint: str, version: str) -> TracerProvider:
        assert endpoint == ENDPOINT
        return make_provider(endpoint, version, kept)

    monkeypatch.setattr(server.tracing, "make_provider", make)
    return kept


def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_below_its_callers(exporter: InMemorySpanExporter, stream: bool) -> None:
    async with serving(otlp_endpoint=ENDPOINT) as served:
        body = {"prompt": [5] * 9, "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": stream}
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        assert (await served.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    span = only_span(exporter)
    assert span.name == "llm_request"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    found = dict(span.attributes or {})
    queued, first, whole = (
        found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert isinstance(queued, float)
    assert isinstance(first, float)
    assert isinstance(whole, float)
    assert 0 <= queued <= first <= whole
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == round(whole * 1e9)
    assert found == {
        "gen_ai.request.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "http.route": "/v1/completions",
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_what_was_never_accepted_is_none(exporter: InMemorySpanExporter) -> None:
    async with serving(otlp_endpoint=ENDPOINT) as served:
        await served.client.post("/v1/completions", json={"prompt": "a", "n": 99})
        await served.client.get("/health/ready")
    assert exporter.get_finished_spans() == ()


async def test_a_request_that_fails_is_an_error(exporter: InMemorySpanExporter) -> None:
    runner = FakeRunner(VOCAB_SIZE)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.error = RuntimeError("gone")
        assert (await served.client.post("/v1/completions", json={"prompt": "a"})).status_code == 500
    assert only_span(exporter).status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_is_an_error(exporter: InMemorySpanExporter) -> None:
    runner = FakeRunner(VOCAB_SIZE)
    async with serving(runner, otlp_endpoint=ENDPOINT) as served:
        runner.hold()
        leaving = asyncio.create_task(served.client.post("/v1/completions", json={"prompt": "a"}))
        await served.submitted.acquire()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        runner.release()
    span = only_span(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


def test_nothing_is_imported_where_no_endpoint_is_set() -> None:
    code = (
        "import sys, asyncio; sys.modules['opentelemetry.sdk'] = None\n"
        "from tests.serving import serving\n"
        "async def main():\n"
        "    async with serving() as served:\n"
        "        print((await served.client.post('/v1/completions', json={'prompt': 'a'})).status_code)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "200\n"


def test_without_the_packages_the_setting_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from tests.serving import fake_app, FakeRunner, VOCAB_SIZE\n"
        f"fake_app(FakeRunner(VOCAB_SIZE), otlp_endpoint={ENDPOINT!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("server.errors.StartupError: otlp_endpoint needs opentelemetry")
    assert "[cpu,otel]" in done.stderr
