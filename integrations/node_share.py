"""The share of a machine that Ray gives to one of its processes, as settings."""

from __future__ import annotations

import ray

from kvasir.model.platform.machine import available_memory, usable_cpus
from kvasir.server.settings import Settings


def of_this_node(settings: Settings) -> Settings:
    """Return settings with the threads that `num_cpus` is, and as large a part of the memory.

    What they name themselves stays. With a GPU they stay as they are.
    """
    resources = ray.get_runtime_context().get_assigned_resources()
    if resources.get("GPU"):
        return settings
    threads = settings.threads or max(1, int(resources.get("CPU", 1)))
    part = min(1.0, threads / usable_cpus())
    memory = settings.kv_cache_memory or max(1, int(part * available_memory() / 2))
    return settings.model_copy(update={"threads": threads, "kv_cache_memory": memory})
