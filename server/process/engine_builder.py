"""The engine of a model directory, checked and built as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvasir.model.adapters.layout import Layout
from kvasir.model.directory import (
    ADAPTERS_FILE,
    ENCODER_GRAPH_FILE,
    ModelDirectory,
    ModelDirectoryError,
    load_model_dir,
)
from kvasir.model.platform.suggestions import install_command
from kvasir.server.engine.adapters.loaded import NoAdaptersError
from kvasir.server.engine.encoder.engine import TOKEN_BUDGET, EncoderEngine
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.cuda_runtime import NoDeviceError
from kvasir.server.engine.model_runner import Runner, warm_up
from kvasir.server.errors import StartupError
from kvasir.server.requests.adapters.served import WITHOUT_ADAPTERS, why_no_adapters
from kvasir.server.requests.async_engine import AnyEngine
from kvasir.server.requests.served_model import ServedModel, onnxruntime_version
from kvasir.server.settings import Settings, user_cache
from kvasir.server.telemetry.start_clock import StartClock

if TYPE_CHECKING:
    from pathlib import Path

    from kvasir.kernels.library import Choice, Library

logger = logging.getLogger("kvasir")

_CPU_CHUNK = 256  # prompt tokens in a step, unless `chunk_size` is set

_NO_KV_EVENTS = (
    "kv_events is for a lone decoder without recurrent layers, with a prefix cache; leave it out"
)


@contextmanager
def needed(setting: str, extra: str) -> Iterator[None]:
    """Raise StartupError if an import of the block fails, which a setting needs."""
    try:
        yield
    except ImportError as error:
        command = install_command("cpu", extra)
        message = f"{setting} needs {error.name}; install it with: {command}"
        raise StartupError(message) from None


def check_model(settings: Settings, name: str | None = None) -> ModelDirectory:
    """Load a model directory, of the first model unless one is named.

    Raises StartupError if it is damaged or cannot be served here.
    """
    path = settings.models[name or settings.model_name]
    try:
        model_dir = load_model_dir(path)
    except ModelDirectoryError as error:
        raise StartupError(str(error)) from None
    device, precision = model_dir.manifest.device, model_dir.manifest.precision
    if settings.precision not in (None, precision):
        raise StartupError(
            f"{path} is in {precision}, not {settings.precision}: leave the setting precision out, "
            "or name what it was exported from"
        )
    if device == "cpu":
        if onnxruntime_version() is None or find_spec("onnxruntime") is None:
            raise StartupError(f"this needs onnxruntime; install it with: {install_command('cpu')}")
        return model_dir
    from kvasir.server.engine.gpu.session import BACKENDS  # noqa: PLC0415  imports ONNX Runtime

    try:
        BACKENDS[device].require()
    except NoDeviceError as error:
        raise StartupError(f"{path} was exported for {device}: {error}") from None
    if settings.threads is not None:
        raise StartupError("setting threads is for the CPU; leave it out for a model on a GPU")
    if settings.prefix_dir is not None:
        raise StartupError("setting prefix_dir is for the CPU; leave it out for a model on a GPU")
    if settings.prefix_cache_memory:
        cause = "setting prefix_cache_memory can only be 0 on a GPU"
        raise StartupError(f"{cause}: blocks are kept in kv_cache_memory")
    if settings.kv_cache_memory is None and len(settings.models) > 1:
        raise StartupError("setting kv_cache_memory is needed for several models with one on a GPU")
    return model_dir


def find_library(settings: Settings, model_dir: ModelDirectory) -> Library | None:
    """Return the library of a model's operators; None for stock ones.

    A line in the log says why stock ones have to do.
    """
    if model_dir.manifest.device != "cpu":
        return None
    folder = settings.cache_dir
    if folder is None:
        with suppress(StartupError):  # as of a container's user
            folder = user_cache()
    return _find_library(settings.kernels, folder)


@cache  # for all models
def _find_library(choice: Choice, folder: Path | None) -> Library | None:
    from kvasir.kernels.library import Library, load  # noqa: PLC0415  imports ONNX Runtime

    library = load(choice, folder)
    if isinstance(library, Library):
        if library.fault:
            logger.info("the path %s of our operators is used: %s", library.path, library.fault)
        return library
    logger.info("%s; int8 and int4 take longer, and by default nothing is drafted", library)
    return None


def build_encoder_engine(
    settings: Settings, model_dir: ModelDirectory, clock: StartClock | None = None
) -> EncoderEngine:
    """Load a model with a pooling. Raises ValueError for settings that it cannot meet."""
    from kvasir.server.engine.encoder.runner import EncoderRunner  # noqa: PLC0415  imports ONNX Runtime

    if settings.kv_events is not None:
        raise ValueError(_NO_KV_EVENTS)
    n_types = model_dir.config.n_token_types or 1
    highest = max(model_dir.tokenizer.encode("a", "a").type_ids, default=0)
    if highest >= n_types > 1:  # of a lone type, the runner ignores others
        raise ValueError(
            f"its tokenizer gives token type {highest} to pairs of texts, but the model has only "
            f"{n_types} types; mend the tokenizer's post-processor, and export the model again"
        )
    library = find_library(settings, model_dir)
    layout = read_layout(model_dir, library) if settings.has_adapters else None
    runner = EncoderRunner(
        model_dir.graph_path,
        model_dir.config,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        fits_16_bits=model_dir.manifest.fits_16_bits,
        library=library,
        layout=layout,
    )
    if clock is not None:
        clock.lap("session")
    return EncoderEngine(
        runner,
        token_budget=settings.chunk_size or TOKEN_BUDGET,
        max_num_seqs=settings.max_num_seqs,
        library=library,
        adapters=runner.adapters,
    )


def build_engine(
    settings: Settings, model_dir: ModelDirectory, clock: StartClock | None = None
) -> Engine:
    """Load a model of text and warm it up, which takes seconds.

    Raises ValueError for settings that this machine or model cannot meet.
    """
    if model_dir.config.pooling is not None:
        raise ValueError(f"{model_dir.path} makes vectors of texts and cannot continue them")
    if settings.speculate and model_dir.config.encoder is not None:
        raise ValueError("speculate is not for encoder-decoders; leave it out")
    if settings.speculate and model_dir.config.recurrence is not None:
        why = "a wrong draft would move the states of its recurrent layers"
        raise ValueError(f"speculate is not for {model_dir.path.name}: {why}; leave it out")
    device, chunk_size = model_dir.manifest.device, settings.chunk_size or _CPU_CHUNK
    if device != "cpu":
        from kvasir.server.engine.gpu.session import BACKENDS  # noqa: PLC0415  imports ONNX Runtime

        chunk_size = settings.chunk_size or BACKENDS[device].chunk_size
    target, library = settings.itl_target_ms, find_library(settings, model_dir)
    layout = read_layout(model_dir, library) if settings.has_adapters else None
    runner = _open_runner(settings, model_dir, chunk_size, library, layout, clock or StartClock())
    speculate = runner.drafts_exactly if settings.speculate is None else settings.speculate
    if speculate and not runner.drafts_exactly:
        logger.info("speculation is on: the load may change answers, by rounding")
    engine = Engine(
        runner,
        chunk_size=chunk_size,
        itl_target=None if target is None else target / 1e3,
        speculate=speculate,
        library=library,
        adapters=getattr(runner, "adapters", None),
    )
    if settings.kv_events is not None:
        is_lone, cache = len(settings.models) == 1 and not settings.models_dir, engine.kv.cache
        if not is_lone or not cache.capacity or engine.kv.state_bytes:
            raise ValueError(_NO_KV_EVENTS)
        with needed("kv_events", "kv-events"):
            from kvasir.server.telemetry.kv_events import KVEvents  # noqa: PLC0415  imports zmq
        addresses = settings.kv_events, settings.kv_events_replay
        engine.scheduler.on_blocks = KVEvents(settings.model_name, cache, *addresses)
    return engine


def read_layout(model_dir: ModelDirectory, library: Library | None) -> Layout:
    """Return how adapters fit a model. Raises NoAdaptersError for one that takes none."""
    if reason := why_no_adapters(model_dir):
        raise NoAdaptersError(f"it takes no adapters: {reason}, or leave adapters out")
    if library is None:
        logger.info("adapters of %s are computed by ONNX Runtime, slowly", model_dir.path.name)
    return Layout.load(model_dir.path / ADAPTERS_FILE)


def build_beside_others(
    build: Callable[..., AnyEngine], served: ServedModel, clock: StartClock
) -> AnyEngine:
    """Build a model's engine. Beside others, one that takes no adapters is served without them."""
    try:
        return build(served.settings, served.model_dir, clock)
    except NoAdaptersError as error:
        if len(served.settings.models) == 1:
            raise
        logger.warning("%s is served without adapters: %s", served.model_dir.path.name, error)
        served.settings = served.settings.model_copy(update=WITHOUT_ADAPTERS)
        return build(served.settings, served.model_dir, clock)


def _open_runner(
    settings: Settings,
    model_dir: ModelDirectory,
    chunk_size: int,
    library: Library | None,
    layout: Layout | None,
    clock: StartClock,
) -> Runner:
    """Load the graphs of a model of text and warm them up."""
    device, config, n_models = model_dir.manifest.device, model_dir.config, len(settings.models)
    sizes: dict[str, Any] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "kv_cache_bytes": settings.kv_cache_memory,
    }
    if device != "cpu":
        from kvasir.server.engine.gpu.session import open_gpu_runner  # noqa: PLC0415

        sizes |= {"chunk_size": chunk_size, "keep_prompts": settings.prefix_cache_memory != 0}
        captures = settings.cuda_graphs and n_models == 1
        runner: Runner = open_gpu_runner(
            device, model_dir.graph_path, config, captures=captures, **sizes
        )
        clock.lap("session_and_warm_up")
        return runner
    sizes |= {"n_models": n_models, "threads": settings.threads}
    if config.encoder is not None:
        from kvasir.server.engine.seq2seq.runner import Seq2SeqRunner  # noqa: PLC0415

        encoder, fits = model_dir.path / ENCODER_GRAPH_FILE, model_dir.manifest.fits_16_bits
        runner = Seq2SeqRunner(
            encoder,
            model_dir.graph_path,
            config,
            fits_16_bits=fits,
            library=library,
            layout=layout,
            **sizes,
        )
        clock.lap("session_and_warm_up")
        return runner
    from kvasir.server.engine.packed import open_decoder  # noqa: PLC0415  imports ONNX Runtime
    from kvasir.server.process.prefix_dir import keep_prefixes  # noqa: PLC0415  does so, too

    sizes["prefix_cache_bytes"] = settings.prefix_cache_memory
    runner = open_decoder(model_dir.graph_path, config, library, layout, **sizes)
    clock.lap("session")
    warm_up(runner)
    keep_prefixes(settings, model_dir, runner, library)
    clock.lap("warm_up")
    return runner
