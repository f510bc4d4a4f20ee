"""Prometheus metrics of a server: the registry, which its models share, and its own.

This file and metrics.py alone import prometheus_client. Each server has a registry of its own, so
nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import disable_created_metrics
from prometheus_client.openmetrics import exposition as openmetrics

from kvasir.model.platform.machine import available_memory, memory_limit
from kvasir.server.errors import KvasirError

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Otherwise each counter has a second series, with the time of its creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

_MAX_KEYS = 1000  # with series of their own
_MAX_ADAPTERS = 200  # likewise

# Gauges that are read when they are scraped, in the order of `Load`, and those of all models.
LOAD: dict[str, tuple[str, Callable[..., float]]] = {
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


def read_item(read: Callable[[], Any], key: Any) -> float:
    """Return one of the values that a function reads."""
    return float(read()[key])


class ServerMetrics:
    """The registry of a server: metrics of its models, which share their families, and its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, file descriptors, processor time, start
        self._router = CollectorRegistry()
        self._facts: dict[str, tuple[str, ...]] = {}  # of `describe`, by model
        self.loads: list[Load] = []  # of models, from which a router's gauges are read
        for index, (name, (text, combine)) in enumerate(LOAD.items()):
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

    def _show(self, gauges: Mapping[str, str], read: Callable[[], tuple[float, ...]]) -> None:
        for index, (name, text) in enumerate(gauges.items()):
            self._gauge(name, text).set_function(partial(read_item, read, index))

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
        self._show(_BATCHES, read)
        by_status = self._gauge("batches_unfinished", "Batches that have not ended.", ["status"])
        for status in unfinished():
            by_status.labels(status).set_function(partial(read_item, unfinished, status))

    def show_adapters(self, read: Callable[[], tuple[float, ...]]) -> None:
        """Show adapters. `read` gives the gauges of `_ADAPTERS`."""
        self._show(_ADAPTERS, read)
        text = "HTTP requests that were begun, by adapter."
        self._adapter_requests = self._counter("adapter_requests", text, ["adapter"])

    def show_models(self, read: Callable[[], tuple[float, ...]], names: Iterable[str]) -> None:
        """Show models that come and go. `read` gives the gauges of `_MODELS`."""
        self._show(_MODELS, read)
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
