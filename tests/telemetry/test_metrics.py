"""Metrics against what a known load must add up to."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir.server.engine.batch import StepKind
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import FinishReason, Sequence
from kvasir.server.telemetry.metrics import Metrics
from kvasir.server.telemetry.server_metrics import ServerMetrics
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, Served, serving, small_tokenizer
from tests.kit.serving import sample as value

NAMES = {
    "gauge": """num_requests_running num_requests_waiting kv_cache_usage_ratio build_info model_info
        state_bytes_per_sequence model_failed key_file_failed shared_state_up memory_limit_bytes
        memory_available_bytes""",
    "counter": """prompt_tokens generation_tokens request_success requests_rejected requests_good
        tokens_wasted prefix_cache_queries prefix_cache_hits spec_decode_draft_tokens
        spec_decode_accepted_tokens key_requests key_tokens ignored_fields""",
    "histogram": """time_to_first_token_seconds inter_token_latency_seconds
        e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
        request_decode_time_seconds request_time_per_output_token_seconds engine_step_seconds
        batch_size request_prompt_tokens request_generation_tokens""",
}
PROCESS = {
    "gauge": "virtual_memory_bytes resident_memory_bytes start_time_seconds open_fds max_fds",
    "counter": "cpu_seconds",
}


async def post(served: Served, **body: Any) -> str:
    return (await served.client.post("/v1/completions", json=body)).text


async def test_the_metrics_are_the_promised_ones_with_their_kinds() -> None:
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
    """Another app in the same process counts for itself."""
    async with serving() as served, serving() as other:
        await post(served, prompt=[[5] * 9, [6] * 3], n=2, max_tokens=6, ignore_eos=True)
        await post(served, prompt="a", n=99)
        metrics = served.model.metrics
        assert value(other.model.metrics, "generation_tokens_total") == 0
    assert value(metrics, "prompt_tokens_total") == 2 * (9 + 3)
    assert value(metrics, "generation_tokens_total") == 4 * 6
    assert value(metrics, "request_success_total", finished_reason="length") == 4
    assert value(metrics, "requests_rejected_total", reason="invalid_request_error") == 1
    assert value(metrics, "tokens_wasted_total") == 0
    assert value(metrics, "inter_token_latency_seconds_count") == 4 * 5
    for name in (
        *("time_to_first_token", "e2e_request_latency", "request_queue_time"),
        *("request_prefill_time", "request_decode_time", "request_time_per_output_token"),
    ):
        assert value(metrics, f"{name}_seconds_count") == 4
    decoding = value(metrics, "request_decode_time_seconds_sum")
    per_token = value(metrics, "request_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx((decoding or 0) / 5)
    assert value(metrics, "request_prompt_tokens_sum") == 2 * (9 + 3)
    assert value(metrics, "request_generation_tokens_sum") == 4 * 6
    batches = served.runner.batches
    assert value(metrics, "batch_size_sum") == sum(decodes for decodes, _ in batches)
    steps = [value(metrics, "engine_step_seconds_count", kind=kind) for kind in get_args(StepKind)]
    assert sum(step or 0 for step in steps) == len(batches)


def test_ends_and_steps_begin_with_zero() -> None:
    """A first failure that begins as 1 is no rise to `rate`."""
    metrics = Metrics(lambda: (0, 0, 0))
    for reason in FinishReason:
        assert value(metrics, "request_success_total", finished_reason=reason.value) == 0
    for kind in get_args(StepKind):
        assert value(metrics, "engine_step_seconds_count", kind=kind) == 0


async def test_requests_and_tokens_are_counted_by_the_keys_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("name=alice one\nname=alice two\nthree\n")
    async with serving(api_key_file=path) as served:
        for key, n in (("one", 1), ("two", 2), ("three", 1), ("wrong", 1)):
            served.client.headers["authorization"] = f"Bearer {key}"
            await post(served, prompt=[5] * 9, n=n, max_tokens=6, ignore_eos=True)
        await served.client.get("/nothing")
        text = (await served.client.get("/metrics")).text
        metrics = served.model.metrics
        assert value(metrics, "key_file_failed") == 0
        path.unlink()
        await served.client.get("/v1/models")
        assert value(metrics, "key_file_failed") == 1
    assert value(metrics, "key_requests_total", key="alice") == 2
    assert value(metrics, "key_tokens_total", key="alice", kind="prompt") == 2 * 9
    assert value(metrics, "key_tokens_total", key="alice", kind="completion") == 3 * 6
    assert value(metrics, "key_requests_total", key="line-3") == 1
    assert not any(f'"{key}"' in text for key in ("one", "two", "three", "wrong"))


def test_keys_that_change_without_end_have_no_series_without_end() -> None:
    metrics = Metrics(lambda: (0, 0, 0))
    for n in range(3000):
        metrics.server.asked(f"key-{n}")
        metrics.used(f"key-{n}", 1, 2)
    assert metrics.server.render("")[0].count(b"kvasir_key_requests_total{") == 1001
    assert value(metrics, "key_requests_total", key="other") == 2000
    metrics.server.asked("key-0")
    assert value(metrics, "key_requests_total", key="key-0") == 2


def ended(n_tokens: int, *times: float | None) -> Sequence:
    """A sequence with the times at which it was scheduled, got its first token, and ended."""
    params = SamplingParams(max_tokens=99)
    sequence = Sequence(0, [1], params, frozenset(), 100.0, output_ids=[1] * n_tokens)
    sequence.scheduled_at, sequence.first_token_at, sequence.finished_at = times
    return sequence


def test_a_good_request_meets_every_limit() -> None:
    rng = random.Random(1)
    metrics, n_good = Metrics(lambda: (0, 0, 0)), 0
    for _ in range(300):
        first, gap, n_tokens = rng.uniform(0, 5), rng.uniform(0, 0.4), rng.randrange(1, 50)
        reason = rng.choice(list(FinishReason))
        last = 100 + first + gap * (n_tokens - 1)
        sequence = ended(n_tokens, 100.0, 100 + first, last + 1e-5)
        metrics.finished(sequence, reason, wasted=False)
        n_good += reason in ("stop", "length") and first <= 2.5 and (gap <= 0.2 or n_tokens == 1)
    assert 0 < n_good < 300
    assert value(metrics, "requests_good_total") == n_good


def test_a_request_that_ends_without_a_slot_counts_as_queued_until_then() -> None:
    metrics = Metrics(lambda: (0, 0, 0))
    metrics.finished(ended(0, None, None, 107.0), FinishReason.TIMEOUT, wasted=False)
    metrics.finished(ended(0, 101.0, None, 107.0), FinishReason.TIMEOUT, wasted=False)
    metrics.finished(ended(0, None, None, None), FinishReason.ERROR, wasted=False)
    assert value(metrics, "request_queue_time_seconds_count") == 2
    assert value(metrics, "request_queue_time_seconds_sum") == 7 + 1
    assert value(metrics, "requests_good_total") == 0


@pytest.mark.parametrize(
    ("cache_bytes", "n_queried", "n_hit"), [(2**20, 23 + 23 + 14 + 1, 20 + 8), (0, 0, 0)]
)
async def test_the_prefix_cache_is_counted_in_tokens(
    cache_bytes: int, n_queried: int, n_hit: int
) -> None:
    """A cache that is off is not queried: its hit rate would be zero."""
    async with serving(cache_bytes=cache_bytes) as served:
        for prompt in ([5] * 23, [5] * 23, [5] * 9 + [6] * 5, [7]):
            await post(served, prompt=prompt, max_tokens=1)
        metrics = served.model.metrics
    assert value(metrics, "prefix_cache_queries_total") == n_queried
    assert value(metrics, "prefix_cache_hits_total") == n_hit


@pytest.mark.parametrize("speculate", [False, True])
async def test_several_tokens_of_a_step_are_counted_and_streamed_one_by_one(
    speculate: bool,
) -> None:
    [a] = small_tokenizer().encode("a").ids
    runner = FakeRunner(VOCAB_SIZE, next_token=lambda _: a)
    async with serving(runner, speculate=speculate) as served:
        text = await post(served, prompt=[a] * 4, max_tokens=30, stream=True)
        assert (await served.client.get("/version")).json()["speculate"] is speculate
        metrics = served.model.metrics
    drafted = value(metrics, "spec_decode_draft_tokens_total") or 0
    assert drafted == value(metrics, "spec_decode_accepted_tokens_total")
    assert (drafted > 20) == speculate
    assert value(metrics, "generation_tokens_total") == 30
    assert value(metrics, "inter_token_latency_seconds_count") == 29
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events] == ["a"] * 30


def test_a_router_sees_the_first_prefix_cache_and_prometheus_all() -> None:
    server = ServerMetrics()
    server.show_cache("a", 64, 100)
    server.show_cache("b", 16, 200)
    facts = 'block_size="64"', 'num_gpu_blocks="100"'
    router = server.render("", only_load=True)[0].decode()
    assert f"kvasir_cache_config_info{{{','.join(facts)}}} 1.0\n" in router
    assert router.count("kvasir_cache_config_info{") == 1
    shown = server.render("")[0].decode()
    assert 'kvasir_cache_config_info{block_size="16",model="b",num_gpu_blocks="200"} 1.0' in shown
    assert shown.count("kvasir_cache_config_info{") == 2
