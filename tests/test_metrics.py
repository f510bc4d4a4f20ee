"""Metrics against what a known load must add up to."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE, serving, small_tokenizer

NAMES = {
    "gauge": """num_requests_running num_requests_waiting kv_cache_usage_ratio build_info model_info""",
    "counter": """prompt_tokens generation_tokens request_success requests_rejected tokens_wasted
        prefix_cache_queries prefix_cache_hits spec_decode_draft_tokens spec_decode_accepted_tokens""",
    "histogram": """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds engine_step_seconds
        batch_size request_prompt_tokens request_generation_tokens""",
}
PROCESS = {
    "gauge": "virtual_memory_bytes resident_memory_bytes start_time_seconds open_fds max_fds",
    "counter": "cpu_seconds",
}


async def test_every_promised_metric_is_there_with_its_kind_and_nothing_else() -> None:
    async with serving() as served:
        text = (await served.client.get("/metrics")).text
    found = {(family.type, family.name) for family in text_string_to_metric_families(text)}
    assert found == {
        (kind, prefix + name)
        for prefix, kinds in (("kvasir_", NAMES), ("process_", PROCESS))
        for kind, names in kinds.items()
        for name in names.split()
    }


async def test_the_figures_of_a_known_load() -> None:
    async with serving() as served:
        body = {"prompt": [[5] * 9, [6] * 3], "n": 2, "max_tokens": 6, "ignore_eos": True}
        await served.client.post("/v1/completions", json=body)
        await served.client.post("/v1/completions", json={"prompt": "a", "n": 99})
        registry = served.service.metrics.registry
        batches = served.runner.batches

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvasir_{name}", labels)

    assert value("prompt_tokens_total") == 2 * (9 + 3)
    assert value("generation_tokens_total") == 4 * 6
    assert value("request_success_total", finished_reason="length") == 4
    assert value("requests_rejected_total", reason="invalid_request_error") == 1
    assert value("tokens_wasted_total") == 0
    assert value("inter_token_latency_seconds_count") == 4 * 5
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert value(f"{name}_seconds_count") == 4
    assert value("request_prompt_tokens_sum") == 2 * (9 + 3)
    assert value("request_generation_tokens_sum") == 4 * 6
    assert value("batch_size_sum") == sum(decodes for decodes, _ in batches)
    steps = [value("engine_step_seconds_count", kind=kind) or 0.0 for kind in ("prefill", "decode", "mixed")]
    assert sum(steps) == len(batches)


async def test_the_prefix_cache_is_counted_in_tokens() -> None:
    async with serving(cache_bytes=2**20) as served:
        for prompt in ([5] * 23, [5] * 23, [5] * 9 + [6] * 5, [7]):
            await served.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        registry = served.service.metrics.registry
    assert registry.get_sample_value("kvasir_prefix_cache_queries_total") == 23 + 23 + 14 + 1
    assert registry.get_sample_value("kvasir_prefix_cache_hits_total") == 20 + 8


async def test_a_cache_that_is_off_is_not_queried() -> None:
    """Or its hit rate is one of zero, where there is none."""
    async with serving(cache_bytes=0) as served:
        await served.client.post("/v1/completions", json={"prompt": [5] * 23, "max_tokens": 1})
        registry = served.service.metrics.registry
    assert registry.get_sample_value("kvasir_prefix_cache_queries_total") == 0


async def test_two_apps_count_for_themselves() -> None:
    async with serving() as one, serving() as other:
        await one.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "ignore_eos": True})
        values = [s.service.metrics.registry.get_sample_value("kvasir_generation_tokens_total") for s in (one, other)]
    assert values == [1, 0]


@pytest.mark.parametrize("speculate", [False, True])
async def test_several_tokens_of_a_step_are_counted_and_streamed_one_by_one(speculate: bool) -> None:
    [a] = small_tokenizer().encode("a").ids
    runner = FakeRunner(VOCAB_SIZE, next_token=lambda _: a)
    async with serving(runner, speculate=speculate) as served:
        body = {"prompt": [a] * 4, "max_tokens": 30, "stream": True}
        text = (await served.client.post("/v1/completions", json=body)).text
        assert (await served.client.get("/version")).json()["speculate"] is speculate
        registry = served.service.metrics.registry
    drafted, accepted, generated = (
        registry.get_sample_value(f"kvasir_{name}_tokens_total")
        for name in ("spec_decode_draft", "spec_decode_accepted", "generation")
    )
    assert (drafted or 0) == (accepted or 0)
    assert ((drafted or 0) > 20) == speculate
    assert generated == 30
    assert registry.get_sample_value("kvasir_inter_token_latency_seconds_count") == 29
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events] == ["a"] * 30
