"""The engine of a model directory, built as the settings say."""

from __future__ import annotations

import logging

from model.bundle import ModelBundle
from server.engine.engine import Engine
from server.settings import Settings
from server.telemetry.start_clock import StartClock

logger = logging.getLogger("kvasir")

_CPU_CHUNK = 256  # prompt tokens in a step, unless `chunk_size` is set


def build_engine(
    settings: Settings, bundle: ModelBundle, clock: StartClock | None = None
) -> Engine:
    """Load the model and warm it up, which takes seconds.

    Raises ValueError for settings that this machine or model cannot meet.
    """
    if settings.speculate:
        logger.info("speculation is on: the load may change answers, by rounding")
    build = _build_on_cuda if bundle.manifest.device == "cuda" else _build_on_cpu
    return build(settings, bundle, clock or StartClock())


def _build_on_cpu(settings: Settings, bundle: ModelBundle, clock: StartClock) -> Engine:
    from server.engine.runner import OnnxRunner  # noqa: PLC0415  imports ONNX Runtime

    runner = OnnxRunner(
        bundle.graph_path,
        bundle.config,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_memory,
        prefix_cache_bytes=settings.prefix_cache_memory,
        threads=settings.threads,
        spin_microseconds=settings.spin_microseconds,
    )
    clock.lap("session")
    runner.warm_up()
    clock.lap("warm_up")
    chunk_size = settings.chunk_size or _CPU_CHUNK
    return Engine(runner, chunk_size=chunk_size, speculate=settings.speculate)


def _build_on_cuda(settings: Settings, bundle: ModelBundle, clock: StartClock) -> Engine:
    from server.engine.cuda.session import DEFAULT_CHUNK_SIZE, open_cuda_runner  # noqa: PLC0415

    runner = open_cuda_runner(
        bundle.graph_path,
        bundle.config,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_memory,
        keep_prompts=settings.prefix_cache_memory != 0,
    )
    clock.lap("session_and_warm_up")
    chunk_size = settings.chunk_size or DEFAULT_CHUNK_SIZE
    return Engine(runner, chunk_size=chunk_size, speculate=settings.speculate)
