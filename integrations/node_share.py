"""The share of a machine that Ray gives to one of its processes, as settings."""

import ray

from kvasir.model.platform.machine import available_memory, usable_cpus
from kvasir.server.settings import Settings


def of_this_node(settings: Settings) -> Settings:
    """Return settings with the threads that `num_cpus` is, and as large a part of the memory."""
    given = ray.get_runtime_context().get_assigned_resources()
    if given.get("GPU"):
        return settings
    threads = settings.threads or max(1, int(given.get("CPU", 1)))
    part = int(min(1, threads / usable_cpus()) * available_memory() / 2)
    memory = settings.kv_cache_memory or part
    return settings.model_copy(update={"threads": threads, "kv_cache_memory": memory})
