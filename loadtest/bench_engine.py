"""Benchmarks of the engine without HTTP: decode, prefill, memory roofline, time outside the model.

Weights are random, in a preset's shape; figures are medians. The roofline is measured in the same
run: a decode step must read every weight that it uses and the keys and values of every sequence.
The best of several readings of as many bytes, from the same caches, gives the memory's speed; on a
GPU a copy does.

Operators of our own and stock ones are compared in one process, figure by figure in turn: a ratio
then hardly depends on what else the machine does.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch

from kvasir.kernels.library import Choice, Library, load
from kvasir.loadtest.engine_figures import Comparison, DecodeFigures, EngineFigures
from kvasir.loadtest.random_model import folder_name, make_random_model
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import GRAPH_FILE, Device
from kvasir.model.network.transformer import Transformer
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.platform.machine import processor_name, usable_cpus
from kvasir.model.platform.progress import Progress, no_progress, with_progress
from kvasir.model.presets import preset
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import open_gpu_runner
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.model_runner import warm_up
from kvasir.server.engine.packed import open_decoder
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence

DECODE_BATCHES: dict[Device, tuple[int, ...]] = {"cpu": (1, 4, 16), "cuda": (1, 8, 32, 128)}
PREFILL_TOKENS: dict[Device, tuple[int, ...]] = {"cpu": (128, 512), "cuda": (512, 1536)}
_LONG_PREFILL = 2048  # tokens: such a prompt is timed once, shorter ones five times
_CHUNK: dict[Device, int] = {"cpu": 256, "cuda": 2048}
_PROMPT_TOKENS = 128
_DECODE_STEPS = 48
_PREFILL_ROUNDS = 5
_READ_BYTES = 2**30  # at most, at once
# Bytes of a weight in the layers, of one in the head, and of a key or value. int4 has a scale for
# each 32 weights: in float32 in the CPU's memory, where a tenth of the weights keep 8 bits, in 16
# bits on CUDA, where int8 has such a scale too.
_BYTES: dict[tuple[Device, str], tuple[float, float, int]] = {
    ("cpu", "fp32"): (4.0, 4.0, 4),
    ("cpu", "int8"): (1.0, 1.0, 1),
    ("cpu", "int4"): (0.6625, 1.0, 1),
    ("cuda", "bf16"): (2.0, 2.0, 2),
    ("cuda", "fp16"): (2.0, 2.0, 2),
    ("cuda", "int8"): (1.0625, 1.0625, 2),
    ("cuda", "int4"): (0.5625, 0.5625, 2),
}


def find_libraries(choices: str | None, device: Device) -> tuple[Library | None, ...]:
    """Return the library of a choice, and None, which is stock operators, if ",off" follows.

    A choice is on, off, or the name of a path; by default on, where a server would use it. Raises
    ValueError for a choice that is none or cannot be had.
    """
    names = ("on",) if choices is None else tuple(choices.split(","))
    if {"on", *get_args(Choice)}.isdisjoint(names[:1]) or names[1:] not in {(), ("off",)}:
        raise ValueError(f"kernels are {choices!r}; they may be on, off, or such as on,off")
    stock = (None,) * names.count("off")
    if names[0] == "off":
        return stock
    library: Library | str = f"{device} has no products for them"
    if device == "cpu":
        library = load("auto" if names[0] == "on" else cast("Choice", names[0]), None)
    if isinstance(library, Library):
        return (library, *stock)
    if choices is not None:
        raise ValueError(f"kernels cannot be {names[0]}: {library}")
    return (None,)


def longer_context(name: str, prompts: Collection[int]) -> dict[str, Any]:
    """Return what makes a preset's context as long as prompts need, if it is shorter."""
    needed = max(prompts, default=0) + 1
    return {"max_model_len": needed} if needed > preset(name).max_model_len else {}


def bench_engine(
    name: str,
    precision: str,
    threads: int | None,
    cache: Path,
    device: Device,
    progress: Progress = no_progress,
    libraries: tuple[Library | None, ...] = (None,),
    prompts: Collection[int] = (),
) -> EngineFigures | Comparison:
    """Measure a preset with the operators of a library, or of two in turn; None: stock ones.

    Weights are random, and kept in `cache`. prompts: numbers of tokens; by default those of the
    device; one that is longer than the preset's context makes that longer. Raises as
    `make_random_model`, and ValueError for an encoder-decoder.
    """
    if device not in DECODE_BATCHES:
        raise ValueError(f"no figures of {device}; there are {', '.join(DECODE_BATCHES)}")
    config, batches, threads = preset(name), DECODE_BATCHES[device], threads or usable_cpus()
    if config.encoder is not None:
        how = "measure encoder-decoders with: kvasir bench serve DIR --workload seq2seq"
        raise ValueError(f"{name} has no prompts; {how}")
    shape = longer_context(name, prompts)
    config, folder = preset(name, **shape), cache / folder_name(name, precision, device, **shape)
    graph = make_random_model(name, precision, folder, device, progress, **shape) / GRAPH_FILE
    progress("loading the model", 0, 0)
    benches = [
        _EngineBench(_open(graph, config, threads, device, len(libraries), library), _CHUNK[device])
        for library in libraries
    ]
    progress("reading memory", 0, 0)
    copied, peak = measure_gpu() if device == "cuda" else (None, None)
    lengths = with_progress(sorted({*prompts}) or PREFILL_TOKENS[device], "prefill", progress)
    prefill = [(n, [bench.prefill(n) for bench in benches]) for n in lengths]
    decode: list[list[DecodeFigures]] = []
    for batch in with_progress(batches, "decode", progress):
        measured = [bench.decode(batch, temperature=0.0) for bench in benches]
        n_bytes = bytes_per_step(config, precision, batch, device)
        speed = copied or read_speed(n_bytes, threads)
        decode.append([_decode_figures(batch, n_bytes, speed, *figures) for figures in measured])
    progress("time outside the model", 0, 0)
    sampled = [bench.decode(batches[-1], temperature=0.8)[1] for bench in benches]
    per_token = 2 * n_layer_weights(config)
    figures = [
        EngineFigures(
            preset=name,
            device=device,
            precision=precision,
            threads=threads,
            processor=processor_name(),
            kernels=library.path if library else None,
            versions={"onnxruntime": onnxruntime.__version__, "python": platform.python_version()},
            decode=[row[i] for row in decode],
            prefill_tokens_per_second={n: speeds[i] for n, speeds in prefill},
            outside_greedy=decode[-1][i].outside,
            outside_sampled=sampled[i],
            peak_teraflops=peak and peak / 1e12,
            prefill_of_peak={n: per_token * speeds[i] / peak for n, speeds in prefill if peak},
        )
        for i, library in enumerate(libraries)
    ]
    return Comparison(*figures) if figures[1:] else figures[0]


def _decode_figures(
    batch: int, n_bytes: float, speed: float, seconds: float, outside: float
) -> DecodeFigures:
    """Return a step's figures; speed: at which memory reads as many bytes, in bytes a second."""
    return DecodeFigures(
        batch=batch,
        tokens_per_second=batch / seconds,
        step_milliseconds=seconds * 1e3,
        read_gigabytes_per_second=speed / 1e9,
        roofline=n_bytes / speed / seconds,
        outside=outside,
    )


def _open(
    graph: Path,
    config: TransformerConfig,
    threads: int,
    device: Device,
    n_models: int,
    library: Library | None,
) -> OnnxRunner | PagedRunner:
    most = DECODE_BATCHES[device][-1]
    if device == "cuda":
        return open_gpu_runner(device, graph, config, max_num_seqs=most, keep_prompts=False)
    runner = open_decoder(
        *(graph, config, library),
        max_num_seqs=most,
        n_models=n_models,
        prefix_cache_bytes=0,
        threads=threads,
    )
    warm_up(runner)
    return runner


class _EngineBench:
    """Measurements on one engine."""

    def __init__(self, runner: OnnxRunner | PagedRunner, chunk_size: int) -> None:
        self._runner = runner
        self._engine = Engine(runner, chunk_size=chunk_size)
        self._ids = count()
        self._generator = np.random.default_rng(0)

    def prefill(self, n_tokens: int) -> float:
        """Return the tokens per second of one prompt alone, until its first new token."""
        n_rounds = _PREFILL_ROUNDS if n_tokens < _LONG_PREFILL else 1
        prompts = iter([self._draw(n_tokens, 1, 0.0) for _ in range(n_rounds + 1)])

        def run() -> None:
            self._engine.add(next(prompts))
            while self._engine.has_work:
                self._engine.step()

        return n_tokens / median(seconds_of(run, n_rounds))

    def decode(self, batch: int, temperature: float) -> tuple[float, float]:
        """Return a decode step's seconds and its share outside the model."""
        for _ in range(batch):
            self._engine.add(self._draw(_PROMPT_TOKENS, _DECODE_STEPS + 2 * batch, temperature))
        seconds, outside = [], []
        while self._engine.has_work:
            before, started = self._runner.model_seconds, perf_counter()
            _, stats = self._engine.step()
            spent = perf_counter() - started
            if stats.n_decode == batch and not stats.n_prefill_tokens:
                seconds.append(spent)
                outside.append(1 - (self._runner.model_seconds - before) / spent)
        return median(seconds), median(outside)

    def _draw(self, n_prompt: int, max_tokens: int, temperature: float) -> Sequence:
        prompt_ids = self._generator.integers(self._runner.vocab_size, size=n_prompt)
        top_p = 0.95 if temperature else 1.0
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        ids = prompt_ids.tolist()
        return Sequence(next(self._ids), ids, params, frozenset(), perf_counter())


def bytes_per_step(config: TransformerConfig, precision: str, batch: int, device: Device) -> float:
    """Return the bytes that a decode step reads: weights, and the KV cache halfway through."""
    weight_bytes, head_bytes, key_bytes = _BYTES[device, precision]
    per_token = KVShape(*config.cache_shape).token_bytes(key_bytes)
    head = head_bytes * config.vocab_size * config.d_model
    weights = weight_bytes * n_layer_weights(config) + head
    return weights + batch * per_token * (_PROMPT_TOKENS + _DECODE_STEPS / 2)


def n_layer_weights(config: TransformerConfig) -> int:
    """Count the weights outside the head and the embedding, of which a token reads one row."""
    with torch.device("meta"):
        n_parameters = Transformer(config).n_parameters
    n_matrices = 1 if config.tied_embeddings else 2
    return n_parameters - n_matrices * config.vocab_size * config.d_model


def seconds_of(work: Callable[[], object], n: int = 9) -> list[float]:
    """Return the times of n runs after a warm-up, each until a GPU is idle."""
    seconds = []
    has_gpu = torch.cuda.is_available()
    synchronize: Callable[[], object] = torch.cuda.synchronize if has_gpu else lambda: None
    for _ in range(n + 1):
        synchronize()
        started = perf_counter()
        work()
        synchronize()
        seconds.append(perf_counter() - started)
    return seconds[1:]


def measure_gpu() -> tuple[float, float]:
    """Return the bytes a second that a copy reads and writes, and the bfloat16 operations."""
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    bandwidth = 2 * source.numel() / median(seconds_of(lambda: target.copy_(source)))
    return bandwidth, 2 * 8192**3 / median(seconds_of(lambda: a @ a))


def read_speed(n_bytes: float, threads: int) -> float:
    """Return the bytes a second at which threads read so many bytes, over and over."""
    size = math.ceil(min(n_bytes, _READ_BYTES) / threads)
    parts = [np.ones(size, dtype=np.int8) for _ in range(threads)]
    n_rounds = math.ceil(_READ_BYTES / 8 / (size * threads))  # else the threads' start would count

    def read(part: npt.NDArray[np.int8]) -> None:
        for _ in range(n_rounds):
            part.max()

    with ThreadPoolExecutor(threads) as pool:
        seconds = min(seconds_of(lambda: list(pool.map(read, parts))))
    return n_rounds * size * threads / seconds
