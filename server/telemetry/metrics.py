"""Prometheus metrics: the only file that imports prometheus_client.

Each server has a registry of its own, so nothing is global. "Request" in a metric's name means one
sequence: a prompt with n = 3 counts three times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import disable_created_metrics
from prometheus_client.openmetrics import exposition as openmetrics

from kvasir.model.platform.machine import available_memory, memory_limit
from kvasir.server.engine.batch import StepKind, StepStats
from kvasir.server.engine.sequence import FinishReason, Sequence
from kvasir.server.errors import KvasirError

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Otherwise each counter has a second series, with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

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

_MAX_KEYS = 1000  # with series of their own
_MAX_ADAPTERS = 200  # likewise

# The limits of a good request. The alerts use the first limit, too.
_GOOD_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_GOOD_FIRST_TOKEN = 2.5  # seconds from its arrival
_GOOD_PER_TOKEN = 0.2  # seconds, the mean of the later ones

# Gauges that are read when they are scraped, in the order of `Load`, and those of all models.
_LOAD: dict[str, tuple[str, Callable[..., float]]] = {
    "num_requests_running": ("Sequences that hold a slot of the KV cache.", sum),
    "num_requests_waiting": ("Sequences that wait for a slot.", sum),
    "kv_cache_usage_ratio": ("Share of the KV cache that is reserved, 0 to 1.", max),
}
# Gauges of batches, in the order in which `show_batches` reads them.
_BATCHES = {
    "batch_requests_pending": "Requests of batches that are not answered.",
    "batches_waiting_for_room": "Batches that wait because the disk or batch_dir_bytes is full.",
    "batch_dir_bytes": "Size of the files of batches.",
    "batch_dir_limit_bytes": "The setting batch_dir_bytes.",
}
# Gauges of adapters, in the order in which `show_adapters` reads them.
_ADAPTERS = {
    "adapters_loaded": "Adapters in memory that requests may name.",
    "adapter_memory_bytes": "Memory of adapters, with those that are unloaded and still used.",
    "adapter_memory_limit_bytes": "The setting adapter_memory.",
}
# Gauges of models that come and go, in the order in which `show_models` reads them.
_MODELS = {
    "models_memory_bytes": "Memory that is kept for loaded models of models_dir.",
    "models_memory_limit_bytes": "The setting models_memory, or what was free at the start.",
    "model_requests_waiting": "Requests that wait until their model is loaded.",
}
Load = Callable[[], tuple[float, float, float]]  # at any moment, on any thread


def _read_item(read: Callable[[], Any], key: Any) -> float:
    return float(read()[key])


class ServerMetrics:
    """The registry of a server: metrics of its models, which share their families, and its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, file descriptors, processor time, start
        self._router = CollectorRegistry()
        self._facts: dict[str, tuple[str, ...]] = {}  # of `describe`, by model
        self.loads: list[Load] = []  # of models, from which a router's gauges are read
        for index, (name, (text, combine)) in enumerate(_LOAD.items()):
            read = partial(self._read_load, index, combine)
            Gauge(name, text, namespace="kvasir", registry=self._router).set_function(read)
        self._families: dict[str, Any] = {}
        self._counter = counter = partial(Counter, namespace="kvasir", registry=self.registry)
        self._gauge = gauge = partial(Gauge, namespace="kvasir", registry=self.registry)
        text = "Requests answered with an error, by reason; model is empty before one is known."
        self._rejected = counter("requests_rejected", text, ["model", "reason"])
        text = "1 if the model could not be loaded; the server's log says why."
        self._failed = gauge("model_failed", text, ["model"])
        text = "1 while api_key_file cannot be taken, so that keys removed from it stay valid."
        self.key_file_failed = gauge("key_file_failed", text)
        self.shared_state_up = gauge("shared_state_up", "0 while state_url cannot be reached.")
        text = "Memory of the container or machine."
        gauge("memory_limit_bytes", text).set_function(memory_limit)
        text = "Memory that is left of it; page cache that is not in use counts as left."
        gauge("memory_available_bytes", text).set_function(available_memory)
        self._key_names: set[str] = set()
        self._adapter_names: set[str] = set()
        self._key_requests = counter("key_requests", "HTTP requests, by API key.", ["key"])
        gauge("build_info", "The software.", ["version"]).labels(version("kvasir-lm")).set(1)
        text = "Requests with a field that has no effect, by field."
        self._ignored = counter("ignored_fields", text, ["field"])
        self.begin_rejections("")

    def describe(self, model: str, facts: Mapping[str, str]) -> None:
        """Show facts of a model, in place of former ones, as labels of a gauge that is 1."""
        family = self.family(Gauge, "model_info", "The model.", list(facts))
        if model in self._facts:
            family.remove(model, *self._facts[model])
        self._facts[model] = tuple(facts.values())
        family.labels(model, *facts.values()).set(1)

    def family(self, kind: Any, name: str, text: str, labels: Iterable[str], **options: Any) -> Any:
        """Return the family of a model's metric; the first model's call makes it."""
        if name not in self._families:
            options |= {"namespace": "kvasir", "registry": self.registry}
            self._families[name] = kind(name, text, ["model", *labels], **options)
        return self._families[name]

    def _read_load(self, index: int, combine: Callable[..., float]) -> float:
        return combine([load()[index] for load in self.loads] or [0.0])

    def show_cache(self, model: str, block_size: int, n_blocks: int) -> None:
        """Show the prefix cache of a model, whose blocks are of so many tokens.

        Routers see the first one.
        """
        name, text = "cache_config_info", "The prefix cache, in blocks of so many tokens."
        facts = {"block_size": block_size, "num_gpu_blocks": n_blocks}  # vLLM's names
        if name not in self._families:
            own = Gauge(name, text, list(facts), namespace="kvasir", registry=self._router)
            own.labels(*facts.values()).set(1)
        self.family(Gauge, name, text, list(facts)).labels(model, *facts.values()).set(1)

    def show_batches(
        self, read: Callable[[], tuple[float, ...]], unfinished: Callable[[], Mapping[str, float]]
    ) -> None:
        """Show batches. `read` gives the gauges of `_BATCHES`, `unfinished` numbers by status."""
        text = "Requests of batches that were answered, by outcome."
        self._batch_requests = self._counter("batch_requests", text, ["outcome"])
        for outcome in ("completed", "failed"):
            self._batch_requests.labels(outcome)
        text = "When a request of a batch was last answered, in seconds since 1970; 0 before that."
        self._batch_answered_at = self._gauge("batch_last_answer_timestamp_seconds", text)
        for index, (name, text) in enumerate(_BATCHES.items()):
            self._gauge(name, text).set_function(partial(_read_item, read, index))
        by_status = self._gauge("batches_unfinished", "Batches that have not ended.", ["status"])
        for status in unfinished():
            by_status.labels(status).set_function(partial(_read_item, unfinished, status))

    def show_adapters(self, read: Callable[[], tuple[float, ...]]) -> None:
        """Show adapters. `read` gives the gauges of `_ADAPTERS`."""
        for index, (name, text) in enumerate(_ADAPTERS.items()):
            self._gauge(name, text).set_function(partial(_read_item, read, index))
        text = "HTTP requests that were begun, by adapter."
        self._adapter_requests = self._counter("adapter_requests", text, ["adapter"])

    def show_models(self, read: Callable[[], tuple[float, ...]], names: Iterable[str]) -> None:
        """Show models that come and go. `read` gives the gauges of `_MODELS`."""
        for index, (name, text) in enumerate(_MODELS.items()):
            self._gauge(name, text).set_function(partial(_read_item, read, index))
        text = "Times that a model of models_dir was loaded."
        self._model_loads = self._counter("model_loads", text, ["model"])
        for name in names:
            self._model_loads.labels(name)

    def loaded(self, model: str) -> None:
        """Record that a model of the folder was loaded."""
        self._model_loads.labels(model).inc()

    def batch_request(self, outcome: str) -> None:
        """Record that a request of a batch was answered: completed or failed."""
        self._batch_requests.labels(outcome).inc()
        self._batch_answered_at.set_to_current_time()

    def failed(self, model: str, *, is_failed: bool) -> None:
        """Show whether a model could not be loaded."""
        self._failed.labels(model).set(is_failed)

    def ignored(self, fields: Iterable[str]) -> None:
        """Record the fields of a request that have no effect, of a fixed list."""
        for name in fields:
            self._ignored.labels(name).inc()

    def begin_rejections(self, model: str) -> None:
        """Show a zero for each reason: a series that begins with 1 shows no rise to `rate`."""
        for reason in KvasirError.reasons():
            self._rejected.labels(model, reason)

    def rejected(self, reason: str, model: str) -> None:
        """Record a request that was answered with an error; its model is "" if none is known."""
        self._rejected.labels(model, reason).inc()

    def asked(self, key: str) -> None:
        """Record a request with a key of this name, before its answer."""
        self._key_requests.labels(self.key_label(key)).inc()

    def adapted(self, adapter: str) -> None:
        """Record a request with an adapter of this name, or `other`: folders may come and go."""
        if len(self._adapter_names) < _MAX_ADAPTERS:
            self._adapter_names.add(adapter)
        label = adapter if adapter in self._adapter_names else "other"
        self._adapter_requests.labels(label).inc()

    def key_label(self, key: str) -> str:
        """Return the name, or `other` for one too many: files of keys may change without end."""
        if len(self._key_names) < _MAX_KEYS:
            self._key_names.add(key)
        return key if key in self._key_names else "other"

    def render(self, accept: str, *, only_load: bool = False) -> tuple[bytes, str]:
        """Return metrics and their type: OpenMetrics where `accept` has it, else Prometheus's text.

        only_load: the gauges that a router balances by, one series each for all models, cheap
        enough for 20 scrapes a second.
        """
        registry = self._router if only_load else self.registry
        if "application/openmetrics-text" in accept.lower():
            content = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return content, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), CONTENT_TYPE


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
        self._gauges = [metric(Gauge, name, text) for name, (text, _) in _LOAD.items()]
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
            gauge.set_function(partial(_read_item, self._load, index))
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
