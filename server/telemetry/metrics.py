"""Prometheus metrics of a model.

"Request" in a metric's name means one sequence: a prompt with n = 3 counts three times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any, get_args

from prometheus_client import Counter, Gauge, Histogram

from kvasir.server.engine.batch import StepKind, StepStats
from kvasir.server.engine.sequence import FinishReason, Sequence
from kvasir.server.telemetry.server_metrics import LOAD, Load, ServerMetrics, read_item

# vLLM's buckets in seconds, finer below: its floor of 10 ms would hide a small model on a CPU.
_FIRST_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_INTER_TOKEN = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_LATENCY = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_BATCH = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


# The limits of a good request. The alerts use the first limit, too.
_GOOD_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_GOOD_FIRST_TOKEN = 2.5  # seconds from its arrival
_GOOD_PER_TOKEN = 0.2  # seconds, the mean of the later ones


class Metrics:
    """The metrics of a version of a model, whose name is their label `model`. steps: the last."""

    def __init__(self, load: Load, server: ServerMetrics | None = None, model: str = "") -> None:
        self.server, self.model, self._load = server or ServerMetrics(), model, load
        self._facts: dict[str, str] = {}
        self.steps = deque[StepStats](maxlen=4096)
        self.server.loads.append(load)
        self.server.begin_rejections(model)
        self.server.failed(model, is_failed=False)

        metric = self._metric
        self._gauges = [metric(Gauge, name, text) for name, (text, _) in LOAD.items()]
        text = "Memory of the states of recurrent layers, of one sequence."
        self.state_bytes = metric(Gauge, "state_bytes_per_sequence", text)
        counter = partial(metric, Counter)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._wasted = counter("tokens_wasted", "Tokens generated for clients that disconnected.")
        self._queried = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._drafted = counter("spec_decode_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_accepted_tokens", "Draft tokens that saved a step.")
        self._finished = counter(
            "request_success", "Requests that ended, by reason.", ["finished_reason"]
        )
        self._key_tokens = counter(
            "key_tokens", "Tokens of accepted requests, by API key.", ["key", "kind"]
        )
        self._good = counter(
            "requests_good",
            f"Complete answers with the first token within {_GOOD_FIRST_TOKEN:g} s of arrival and "
            f"at most {_GOOD_PER_TOKEN:g} s per later token, on average.",
        )

        histogram = partial(metric, Histogram)
        seconds = partial(histogram, buckets=_LATENCY)
        token_seconds = partial(histogram, buckets=_INTER_TOKEN)
        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", buckets=_FIRST_TOKEN
        )
        self._inter_token = token_seconds("inter_token_latency_seconds", "One token to the next.")
        self._e2e = seconds("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = seconds("request_queue_time_seconds", "Arrival to a slot, or to the end.")
        self._prefill = seconds("request_prefill_time_seconds", "Slot to first token.")
        self._decode = seconds("request_decode_time_seconds", "First token to end.")
        self._per_token = token_seconds(
            "request_time_per_output_token_seconds", "First token to end, per later token."
        )
        self._step = token_seconds("engine_step_seconds", "One step of the engine.", ["kind"])
        self._batch = histogram("batch_size", "Sequences that decode in one step.", buckets=_BATCH)
        tokens = partial(histogram, buckets=_TOKENS)
        self._prompt_size = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self._output_size = tokens("request_generation_tokens", "Tokens generated for a request.")

        # A series that begins with 1 shows no rise to `rate`, so all of them begin with 0.
        for reason in FinishReason:
            self._finished(reason.value)
        for kind in get_args(StepKind):
            self._step(kind)
        self.show()

    def _metric(
        self, kind: Any, name: str, text: str, labels: Iterable[str] = (), **options: Any
    ) -> Any:
        family = self.server.family(kind, name, text, labels, **options)
        return partial(family.labels, self.model) if labels else family.labels(self.model)

    def describe(self, **facts: str) -> None:
        """Show facts of the version."""
        self._facts = facts
        self.server.describe(self.model, facts)

    def show(self) -> None:
        """Let the model's gauges tell of this version, in place of another."""
        for index, gauge in enumerate(self._gauges):
            gauge.set_function(partial(read_item, self._load, index))
        if self._facts:
            self.describe(**self._facts)

    def end(self) -> None:
        """Let a router's gauges leave out this version, which serves no more."""
        self.server.loads.remove(self._load)

    def step(self, stats: StepStats) -> None:
        """Record a step of the engine."""
        self.steps.append(stats)
        self._step(stats.kind).observe(stats.seconds)
        self._queried.inc(stats.n_queried)
        self._hits.inc(stats.n_cached)
        self._drafted.inc(stats.n_drafted)
        self._accepted.inc(stats.n_accepted)
        if stats.n_decode:
            self._batch.observe(stats.n_decode)

    def output(self, sequence: Sequence, previous: float | None, now: float, n_tokens: int) -> None:
        """Record an output, with the times of it and the one before, in `perf_counter` seconds."""
        self._generation_tokens.inc(n_tokens)
        if previous is not None:
            if n_tokens and not sequence.is_background:
                self._inter_token.observe(now - previous)
        elif sequence.n_computed >= len(sequence.prompt_ids):
            self._prompt_tokens.inc(len(sequence.prompt_ids))
            if not sequence.is_background:
                self._first_token.observe(now - sequence.arrived_at)

    def finished(self, sequence: Sequence, reason: FinishReason, *, wasted: bool) -> None:
        """Record the end of a sequence; its tokens are wasted if its client has disconnected."""
        n_generated = len(sequence.output_ids)
        self._finished(reason.value).inc()
        self._prompt_size.observe(len(sequence.prompt_ids))
        self._output_size.observe(n_generated)
        if wasted:
            self._wasted.inc(n_generated)
        scheduled, end, n_later = sequence.scheduled_at, sequence.finished_at, n_generated - 1
        if end is None or sequence.is_background:  # whose times are nobody's wait
            return
        arrived = sequence.arrived_at
        first = sequence.first_token_at or end  # where none was wanted, the end counts as the first
        self._e2e.observe(end - arrived)
        self._queue.observe((scheduled or end) - arrived)
        if scheduled is not None and sequence.first_token_at is not None:
            self._prefill.observe(first - scheduled)
            self._decode.observe(end - first)
            if n_later > 0:
                self._per_token.observe((end - first) / n_later)
        is_quick = end - first <= _GOOD_PER_TOKEN * max(1, n_later)
        if reason in _GOOD_ENDS and is_quick and first - arrived <= _GOOD_FIRST_TOKEN:
            self._good.inc()

    def used(self, key: str, n_prompt: int, n_generated: int) -> None:
        """Record the tokens of a request with a key of this name; there is none without keys."""
        if key:
            label = self.server.key_label(key)
            self._key_tokens(label, "prompt").inc(n_prompt)
            self._key_tokens(label, "completion").inc(n_generated)
