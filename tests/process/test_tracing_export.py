"""Spans over the wire: a collector gets them, and requests do not wait for one that is silent."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import pytest

import kvasir.server.process.app
from tests.kit.collector import collecting
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import MODEL, serving

BODY = {"prompt": [5] * 9, "max_tokens": 6, "ignore_eos": True}
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture(autouse=True)
def send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", str(TIMEOUT))  # seconds that it tries
    monkeypatch.setattr(kvasir.server.process.app, "_FLUSH_SECONDS", TIMEOUT)


async def test_spans_arrive_and_requests_do_not_wait_for_the_collector() -> None:
    """It holds the first batch while requests are answered, and gets their spans later."""
    n, parent = 20, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collecting() as collector:
        async with serving(otlp_endpoint=collector.endpoint) as served:
            collector.may_answer.clear()
            await served.client.post("/v1/completions", json=BODY, headers={"traceparent": parent})
            path, first = await asyncio.to_thread(collector.batches.get, timeout=TIMEOUT)
            for _ in range(n):
                assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200
            assert collector.batches.empty()
            collector.may_answer.set()
        sent = [first]
        while not collector.batches.empty():
            sent.append(collector.batches.get()[1])
    spans = [span for one in sent for span in one.scope_spans[0].spans]
    assert len(spans) == (1 + n) * 4
    span = next(one for one in spans if one.kind == one.SPAN_KIND_SERVER)
    assert (path, span.name) == ("/v1/traces", f"text_completion {MODEL}")
    assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == parent
    service = {one.key: one.value.string_value for one in first.resource.attributes}
    assert service["service.name"] == "kvasir"
    found = {one.key: one.value for one in span.attributes}
    assert found["gen_ai.request.model"].string_value == MODEL
    assert found["gen_ai.usage.output_tokens"].int_value == 6
    reasons = found["gen_ai.response.finish_reasons"].array_value.values
    assert [one.string_value for one in reasons] == ["length"]


def test_the_process_does_not_wait_for_it_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is closed, with its threads, while the exporter still waits for the answer."""
    monkeypatch.setattr(kvasir.server.process.app, "_FLUSH_SECONDS", 0.01)

    async def ask(endpoint: str) -> None:
        async with serving(otlp_endpoint=endpoint) as served:
            assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200

    with collecting() as collector:
        collector.may_answer.clear()
        asyncio.run(ask(collector.endpoint))
        (sending,) = [thread for thread in threading.enumerate() if thread.name == "last spans"]
        collector.may_answer.set()
        sending.join(TIMEOUT)
        assert not sending.is_alive()


async def test_an_endpoint_that_refuses_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")
    refused = threading.Semaphore(0)

    def count(record: logging.LogRecord) -> bool:
        refused.release()
        return record.name == EXPORTER

    # This filter comes before the one under test.
    monkeypatch.setattr(logging.getLogger(EXPORTER), "filters", [count])
    with socket.socket() as bound:  # but not listening, so its port refuses
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        async with serving(otlp_endpoint=f"http://127.0.0.1:{port}/v1/traces") as served:
            for _ in range(30):
                assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200
            for _ in range(2):
                assert await asyncio.to_thread(refused.acquire, timeout=TIMEOUT)
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    kinds = [record.msg for record in lines]  # a late try tells of others than the first
    assert len(kinds) == len({*kinds})
    assert str(port) in lines[0].getMessage()
