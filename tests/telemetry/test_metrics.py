"""Metrics against what a known load must add up to."""

from __future__ import annotations

import json
import random
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.engine import StepKind
from server.engine.sampling import SamplingParams
from server.engine.sequence import FinishReason, Sequence, SequenceTimes
from server.telemetry.metrics import Metrics
from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE, serving, small_tokenizer

NAMES = {
    "gauge": """num_requests_running num_requests_waiting kv_cache_usage_ratio build_info model_info""",
    "counter": """prompt_tokens generation_tokens request_success requests_rejected requests_good tokens_wasted
        prefix_cache_queries prefix_cache_hits spec_decode_draft_tokens spec_decode_accepted_tokens""",
    "histogram": """time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
        request_time_per_output_token_seconds engine_step_seconds batch_size
        request_prompt_tokens request_generation_tokens""",
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
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_decode_time",
    ):
        assert value(f"{name}_seconds_count") == 4
    assert value("request_time_per_output_token_seconds_count") == 4
    decoding, per_token = (
        value(f"request_{name}_seconds_sum") for name in ("decode_time", "time_per_output_token")
    )
    assert per_token == pytest.approx((decoding or 0) / 5)
    assert value("request_prompt_tokens_sum") == 2 * (9 + 3)
    assert value("request_generation_tokens_sum") == 4 * 6
    assert value("batch_size_sum") == sum(decodes for decodes, _ in batches)
    steps = [
        value("engine_step_seconds_count", kind=kind) or 0.0
        for kind in ("prefill", "decode", "mixed")
    ]
    assert sum(steps) == len(batches)


def test_ends_and_steps_are_shown_before_there_are_any() -> None:
    """Or the first failure is born as 1, and `rate` never sees it rise."""
    registry = Metrics(lambda: (0, 0, 0)).registry
    for reason in FinishReason:
        assert (
            registry.get_sample_value(
                "kvasir_request_success_total", {"finished_reason": reason.value}
            )
            == 0
        )
    for kind in get_args(StepKind):
        assert registry.get_sample_value("kvasir_engine_step_seconds_count", {"kind": kind}) == 0


def ended(
    n_tokens: int, *, scheduled: float | None, first: float | None, last: float | None
) -> Sequence:
    times = SequenceTimes(100.0, scheduled, first, last)
    sequence = Sequence(0, [1], SamplingParams(max_tokens=99), frozenset(), times)
    sequence.output_ids = [1] * n_tokens
    return sequence


def test_a_good_request_keeps_every_limit() -> None:
    rng = random.Random(1)
    metrics, n_good = Metrics(lambda: (0, 0, 0)), 0
    for _ in range(300):
        first, gap, n_tokens = rng.uniform(0, 5), rng.uniform(0, 0.4), rng.randrange(1, 50)
        reason = rng.choice(list(FinishReason))
        last = 100 + first + gap * (n_tokens - 1)
        metrics.finished(
            ended(n_tokens, scheduled=100.0, first=100 + first, last=last + 1e-5),
            reason,
            wasted=False,
        )
        n_good += reason in ("stop", "length") and first <= 2.5 and (gap <= 0.2 or n_tokens == 1)
    assert 0 < n_good < 300
    assert metrics.registry.get_sample_value("kvasir_requests_good_total") == n_good


def test_whoever_leaves_the_queue_without_a_row_has_waited_too() -> None:
    metrics = Metrics(lambda: (0, 0, 0))
    metrics.finished(
        ended(0, scheduled=None, first=None, last=107.0), FinishReason.TIMEOUT, wasted=False
    )
    metrics.finished(
        ended(0, scheduled=101.0, first=None, last=107.0), FinishReason.TIMEOUT, wasted=False
    )
    metrics.finished(
        ended(0, scheduled=None, first=None, last=None), FinishReason.ERROR, wasted=False
    )
    value = metrics.registry.get_sample_value
    assert (
        value("kvasir_request_queue_time_seconds_count"),
        value("kvasir_request_queue_time_seconds_sum"),
    ) == (2, 8)
    assert value("kvasir_requests_good_total") == 0


async def test_a_grammar_that_cannot_go_on_is_no_error_of_the_engine() -> None:
    async with serving() as served:
        body = {"prompt": "a", "max_tokens": 9, "grammar": 'start: "ab" rest\nrest: rest "c"'}
        assert (await served.client.post("/v1/completions", json=body)).status_code == 400
        value = served.service.metrics.registry.get_sample_value
    counts = {
        end: value("kvasir_request_success_total", {"finished_reason": end}) for end in FinishReason
    }
    assert counts == dict.fromkeys(FinishReason, 0) | {FinishReason.GRAMMAR: 1}


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
        await one.client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1, "ignore_eos": True}
        )
        values = [
            s.service.metrics.registry.get_sample_value("kvasir_generation_tokens_total")
            for s in (one, other)
        ]
    assert values == [1, 0]


@pytest.mark.parametrize("speculate", [False, True])
async def test_several_tokens_of_a_step_are_counted_and_streamed_one_by_one(
    speculate: bool,
) -> None:
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
