"""Health in each phase of a server's life; metrics; version."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from kvasir.server.requests.admission.queue import Phase
from tests.api.test_middleware import PROBED
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import MODEL, VOCAB_SIZE, Served, serving


async def statuses(served: Served) -> dict[str, int]:
    paths = ("live", "ready", "startup")
    return {path: (await served.client.get(f"/health/{path}")).status_code for path in paths}


async def test_each_probe_answers_its_own_question() -> None:
    async with serving() as served:
        assert await statuses(served) == {"live": 200, "ready": 200, "startup": 200}
        served.model.admission.phase = Phase.LOADING
        assert await statuses(served) == {"live": 200, "ready": 503, "startup": 503}
        served.model.admission.phase = Phase.DRAINING
        assert await statuses(served) == {"live": 200, "ready": 503, "startup": 200}


async def test_a_full_queue_is_ready_and_routers_see_it() -> None:
    runner = FakeRunner(
        VOCAB_SIZE, max_num_seqs=1, budget_tokens=66
    )  # a prompt of one token, in two rows, and 31 more
    async with serving(runner, max_queue=1) as served:
        served.runner.hold()
        body = {"prompt": "a", "max_tokens": 31, "ignore_eos": True}
        posts = [
            asyncio.create_task(served.client.post("/v1/completions", json=body)) for _ in range(2)
        ]
        for _ in posts:
            await served.submitted.acquire()
        await asyncio.to_thread(served.runner.wait_until_held)
        assert (await served.client.get("/health/ready")).status_code == 200
        response = await served.client.get("/metrics/router")
        seen = {
            family.name: family.samples[0].value
            for family in text_string_to_metric_families(response.text)
        }
        everything = (await served.client.get("/metrics")).text
        served.runner.release()
        assert [response.status_code for response in await asyncio.gather(*posts)] == [200, 200]
    assert seen == {
        "kvasir_num_requests_running": 1,
        "kvasir_num_requests_waiting": 1,
        "kvasir_kv_cache_usage_ratio": 0.5,
    }
    labelled = {f'{name}{{model="{MODEL}"}} {value}' for name, value in seen.items()}
    assert all(one in everything for one in labelled)


@pytest.mark.parametrize("path", ["/metrics", "/metrics/router"])
async def test_a_scraper_gets_the_format_that_it_asks_for(path: str) -> None:
    """Prometheus asks as the last but one does."""
    async with serving() as served:
        families = []
        for accept, is_open in (
            (None, False),
            ("text/plain; version=0.0.4", False),
            ("application/openmetrics-text", True),
            (
                "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3",
                True,
            ),
            ("application/openmetrics-text;version=\xb2", True),
        ):
            headers = {} if accept is None else {b"accept": accept.encode("latin-1")}
            response = await served.client.get(path, headers=headers)
            kind = "application/openmetrics-text" if is_open else "text/plain"
            assert response.headers["content-type"].startswith(f"{kind}; version=1.0.0; ")
            assert response.headers["vary"] == "accept"
            assert response.text.endswith("# EOF\n") == is_open
            parse = openmetrics_families if is_open else text_string_to_metric_families
            families.append({(one.name, one.type) for one in parse(response.text)})
    assert families == [families[0]] * 5
    assert ("kvasir_num_requests_running", "gauge") in families[0]


async def test_a_probe_may_ask_for_the_headers_alone() -> None:
    """RFC 9110: the same headers as for GET, without a body."""
    async with serving(api_key="one") as served:
        for phase in (Phase.READY, Phase.LOADING):
            served.model.admission.phase = phase
            for path in PROBED:
                got, asked = [await served.client.request(one, path) for one in ("GET", "HEAD")]
                assert (asked.status_code, asked.content) == (got.status_code, b"")
                assert asked.headers.keys() == got.headers.keys()
                assert asked.headers["content-type"] == got.headers["content-type"]
