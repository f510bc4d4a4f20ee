"""Prometheus metrics: the only file that imports prometheus_client. A registry per instance, so nothing is global.

"Request" in a metric's name means one sequence: a prompt with n = 3 counts three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from server.engine.engine import StepKind, StepStats
from server.engine.sequence import FinishReason, Sequence, SequenceTimes
from server.errors import KvasirError

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, saying when it began

# vLLM's buckets, finer below: its floor of 10 ms would hide a small model on a CPU. Seconds.
_FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_INTER_TOKEN = (
    *(
        0.0005,
        0.001,
        0.0025,
        0.005,
        0.01,
        0.015,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
    ),
    *(1.0, 2.5, 5.0, 10.0),
)
_LATENCY = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_BATCH = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)

# What makes a request a good one. The alerts have the first limit, too.
_GOOD_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_GOOD_FIRST_TOKEN = 2.5  # seconds from its arrival
_GOOD_PER_TOKEN = 0.2  # seconds, the mean of the later ones

# Gauges that are read when they are scraped, and shown to routers too.
_LOAD = {
    "kvasir_num_requests_running": "Sequences that hold a row.",
    "kvasir_num_requests_waiting": "Sequences that wait for a row.",
    "kvasir_kv_cache_usage_ratio": "Share of the key-value memory that is promised, 0 to 1.",
}


class Metrics:
    """`load` gives running, waiting and the memory ratio, in that order, at any moment and from any thread."""

    def __init__(self, load: Callable[[], tuple[float, float, float]]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, file descriptors, processor time, start
        self._load = load
        for index, (name, text) in enumerate(_LOAD.items()):
            Gauge(name, text, registry=self.registry).set_function(partial(self._read, index))
        self._count()
        self._measure()

    def _read(self, index: int) -> float:
        return self._load()[index]

    def _count(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that were processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self._wasted = self._counter("tokens_wasted", "Tokens generated for clients that left.")
        self._queried = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self._drafted = self._counter(
            "spec_decode_draft_tokens", "Guessed tokens that were checked."
        )
        self._accepted = self._counter(
            "spec_decode_accepted_tokens", "Guessed tokens that saved a step."
        )
        self._finished = self._counter(
            "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "requests_rejected", "Requests answered with an error, by reason.", "reason"
        )
        self._good = self._counter(
            "requests_good",
            f"Answers in full, with a first token within {_GOOD_FIRST_TOKEN:g} s of arrival "
            f"and later ones every {_GOOD_PER_TOKEN:g} s or faster, on average.",
        )
        _show(self._finished, FinishReason)
        _show(self._rejected, KvasirError.reasons())

    def _measure(self) -> None:
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Token to next token.", _INTER_TOKEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to a row, or the end.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "A row to the first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to end.", _LATENCY
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "First token to end, by later tokens.",
            _INTER_TOKEN,
        )
        self._step = self._histogram(
            "engine_step_seconds", "One step of the engine.", _INTER_TOKEN, "kind"
        )
        _show(self._step, get_args(StepKind))
        self._batch = self._histogram("batch_size", "Sequences that decode in one step.", _BATCH)
        self._prompt_size = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._output_size = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvasir_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"kvasir_{name}", text, labels, buckets=buckets, registry=self.registry)

    def info(self, name: str, text: str, values: dict[str, str]) -> None:
        """A gauge that is always 1 and says what it says in its labels."""
        Gauge(f"kvasir_{name}_info", text, tuple(values), registry=self.registry).labels(
            **values
        ).set(1)

    def step(self, stats: StepStats) -> None:
        self._step.labels(stats.kind).observe(stats.seconds)
        self._queried.inc(stats.n_queried)
        self._hits.inc(stats.n_cached)
        self._drafted.inc(stats.n_drafted)
        self._accepted.inc(stats.n_accepted)
        if stats.n_decode:
            self._batch.observe(stats.n_decode)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The first output of a sequence, at `now`, in seconds of `perf_counter`: its prompt has been processed."""
        self._prompt_tokens.inc(len(sequence.prompt_ids))
        self._first_token.observe(now - sequence.times.arrived)

    def tokens(self, n: int = 1) -> None:
        self._generation_tokens.inc(n)

    def next_token(self, gap: float) -> None:
        self._inter_token.observe(gap)

    def finished(self, sequence: Sequence, reason: FinishReason, *, wasted: bool) -> None:
        """The end of a sequence. `wasted`: its client had left."""
        n_generated = len(sequence.output_ids)
        self._finished.labels(reason.value).inc()
        self._prompt_size.observe(len(sequence.prompt_ids))
        self._output_size.observe(n_generated)
        if wasted:
            self._wasted.inc(n_generated)
        self._observe_times(sequence.times, n_later=n_generated - 1)
        if reason in _GOOD_ENDS and _is_quick(sequence.times, n_later=n_generated - 1):
            self._good.inc()

    def _observe_times(self, times: SequenceTimes, n_later: int) -> None:
        if times.finished is None:
            return
        self._e2e.observe(times.finished - times.arrived)
        self._queue.observe((times.scheduled or times.finished) - times.arrived)
        if times.scheduled is not None and times.first_token is not None:
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.finished - times.first_token)
            if n_later > 0:
                self._per_token.observe((times.finished - times.first_token) / n_later)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def render_load(self) -> bytes:
        """The gauges that a router balances by, and nothing else: cheap enough for 20 scrapes a second."""
        lines = [
            f"# HELP {name} {text}\n# TYPE {name} gauge\n{name} {float(value)}\n"
            for (name, text), value in zip(_LOAD.items(), self._load(), strict=True)
        ]
        return "".join(lines).encode()


def _is_quick(times: SequenceTimes, n_later: int) -> bool:
    """Where no token was wanted, the end counts as the first. `n_later`: tokens behind the first."""
    first = times.first_token or times.finished
    if first is None or times.finished is None:
        return False
    return (
        first - times.arrived <= _GOOD_FIRST_TOKEN
        and times.finished - first <= _GOOD_PER_TOKEN * max(1, n_later)
    )


def _show(metric: Counter | Histogram, values: Iterable[str]) -> None:
    """Have a series for each of the label's values from the start: of one that is born as 1, `rate` sees no rise."""
    for value in values:
        metric.labels(value)
