"""Benchmarks of the bare engine: decode and prefill speed, the memory-bandwidth roofline, time outside the model.

Random weights of a preset's shape; every figure is a median. The roofline is measured in the same run: a decode step
has to read every weight that takes part and the keys and values of every sequence, and a copy shows how fast memory is.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
import torch
from rich.table import Table

from loadtest.random_model import make_random_model
from model.bundle import GRAPH_FILE, Device
from model.config import DecoderConfig, preset
from model.network.decoder import Decoder
from model.progress import Progress, followed, unheard
from server.engine.cuda.runner import PagedRunner
from server.engine.cuda.session import open_cuda_runner
from server.engine.engine import Engine
from server.engine.kv.rows import KVShape
from server.engine.machine import usable_cpus
from server.engine.runner import OnnxRunner
from server.engine.sampling import SamplingParams
from server.engine.sequence import Sequence, SequenceTimes

DECODE_BATCHES: dict[Device, tuple[int, ...]] = {"cpu": (1, 4, 16), "cuda": (1, 8, 32, 128)}
PREFILL_TOKENS: dict[Device, tuple[int, ...]] = {"cpu": (128, 512), "cuda": (512, 2048)}
_CHUNK: dict[Device, int] = {"cpu": 256, "cuda": 2048}
_PROMPT_TOKENS = 128
_DECODE_STEPS = 48
_PREFILL_ROUNDS = 5
_COPY_BYTES = 2**28
# Of a layer's weight, the head's, and of a key or value; int4 with a scale for each 32, in float32, or on CUDA in half.
_BYTES: dict[tuple[Device, str], tuple[float, float, int]] = {
    ("cpu", "fp32"): (4.0, 4.0, 4),
    ("cpu", "int8"): (1.0, 1.0, 1),
    ("cpu", "int4"): (0.625, 1.0, 1),
    ("cuda", "bf16"): (2.0, 2.0, 2),
    ("cuda", "fp16"): (2.0, 2.0, 2),
    ("cuda", "int8"): (1.0625, 1.0625, 2),
    ("cuda", "int4"): (0.5625, 0.5625, 2),
}


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Steps in which `batch` sequences decode.

    roofline: the share of the speed at which memory, as fast as in a copy, could feed the step. outside: the share of
    the step that is not spent inside ONNX Runtime.
    """

    batch: int
    tokens_per_second: float
    step_milliseconds: float
    roofline: float
    outside: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What `kvasir bench engine` measures. outside: share of the largest step that is not spent inside ONNX Runtime.

    threads: on the CPU. peak_teraflops: of a large product in bfloat16, measured on the GPU; prefill_of_peak: the share
    of it that a prompt's two operations a token and weight of the layers are (its last token alone meets the head).
    """

    preset: str
    device: str
    precision: str
    threads: int
    versions: dict[str, str]
    copy_gigabytes_per_second: float
    decode: list[DecodeFigures]
    prefill_tokens_per_second: dict[int, float]
    outside_greedy: float
    outside_sampled: float
    peak_teraflops: float | None = None
    prefill_of_peak: dict[int, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[str | Table]:
        machine = f"{self.threads} threads" if self.device == "cpu" else "one GPU"
        machine += f"; a copy moves {self.copy_gigabytes_per_second:.1f} GB/s"
        decode = Table(title="decode")
        for name in (
            "batch",
            "tokens/s",
            "step, ms",
            "of batch 1",
            "of roofline",
            "outside the model",
        ):
            decode.add_column(name, justify="right")
        for row in self.decode:
            speed_up = row.tokens_per_second / self.decode[0].tokens_per_second
            cells = (
                row.batch,
                f"{row.tokens_per_second:,.0f}",
                f"{row.step_milliseconds:.2f}",
                f"{speed_up:.1f} x",
            )
            decode.add_row(*map(str, cells), f"{row.roofline:.0%}", f"{row.outside:.1%}")
        prefill = Table(title="prefill")
        prefill.add_column("prompt tokens", justify="right")
        prefill.add_column("tokens/s", justify="right")
        if self.prefill_of_peak:
            prefill.add_column(f"of {self.peak_teraflops:.0f} TFLOP/s", justify="right")
        for tokens, speed in self.prefill_tokens_per_second.items():
            share = [f"{self.prefill_of_peak[tokens]:.0%}"] if self.prefill_of_peak else []
            prefill.add_row(f"{tokens:,}", f"{speed:,.0f}", *share)
        outside = Table(title=f"batch-{self.decode[-1].batch} step, share outside the model")
        outside.add_column("greedy", justify="right")
        outside.add_column("temperature 0.8, top-p 0.95", justify="right")
        outside.add_row(f"{self.outside_greedy:.1%}", f"{self.outside_sampled:.1%}")
        return [f"{self.preset}, {self.precision}, {machine}", decode, prefill, outside]


def bench_engine(
    name: str,
    precision: str,
    threads: int | None,
    cache: Path,
    device: Device = "cpu",
    progress: Progress = unheard,
) -> EngineFigures:
    """Measure the engine on a preset with random weights, which is kept in `cache` for the next time.

    Raises ConfigError for an unknown preset or precision, and the errors of make_random_model.
    """
    folder = f"{name}-{precision}" if device == "cpu" else f"{name}-{device}-{precision}"
    graph = make_random_model(name, precision, cache / folder, device, progress) / GRAPH_FILE
    config, batches, threads = preset(name), DECODE_BATCHES[device], threads or usable_cpus()
    progress("loading the model", 0, 0)
    runner = _open_runner(graph, config, device, threads)
    bench = _EngineBench(runner, config, _CHUNK[device])
    progress("copying memory", 0, 0)
    bandwidth = copy_bandwidth(threads) if device == "cpu" else device_bandwidth()
    prefill = {
        tokens: bench.prefill(tokens)
        for tokens in followed(PREFILL_TOKENS[device], "prefill", progress)
    }
    decode = []
    for batch in followed(batches, "decode", progress):
        seconds, outside = bench.decode(batch, temperature=0.0)
        floor = bytes_per_step(config, precision, batch, device) / bandwidth
        decode.append(
            DecodeFigures(batch, batch / seconds, seconds * 1e3, floor / seconds, outside)
        )
    progress("time outside the model", 0, 0)
    outside_greedy, outside_sampled = (bench.decode(batches[-1], heat)[1] for heat in (0.0, 0.8))
    peak = device_flops() if device == "cuda" else None
    in_layers = n_weights(config) - config.vocab_size * config.d_model
    return EngineFigures(
        preset=name,
        device=device,
        precision=precision,
        threads=threads,
        versions={"onnxruntime": onnxruntime.__version__, "python": platform.python_version()},
        copy_gigabytes_per_second=bandwidth / 1e9,
        decode=decode,
        prefill_tokens_per_second=prefill,
        outside_greedy=outside_greedy,
        outside_sampled=outside_sampled,
        peak_teraflops=peak and peak / 1e12,
        prefill_of_peak={n: 2 * in_layers * speed / peak for n, speed in prefill.items()}
        if peak
        else {},
    )


def _open_runner(
    graph: Path, config: DecoderConfig, device: Device, threads: int
) -> OnnxRunner | PagedRunner:
    most = DECODE_BATCHES[device][-1]
    if device == "cuda":
        return open_cuda_runner(graph, config, max_num_seqs=most, keep_prompts=False)
    runner = OnnxRunner(graph, config, max_num_seqs=most, threads=threads)
    runner.warm_up()
    return runner


class _EngineBench:
    """One engine under test."""

    def __init__(
        self, runner: OnnxRunner | PagedRunner, config: DecoderConfig, chunk_size: int
    ) -> None:
        self._runner = runner
        self._config = config
        self._engine = Engine(runner, chunk_size=chunk_size)
        self._ids: Iterator[int] = count()
        self._generator = np.random.default_rng(0)

    def prefill(self, n_tokens: int) -> float:
        """Prompt tokens per second of one prompt alone, until its first token."""
        speeds = []
        for _ in range(_PREFILL_ROUNDS + 1):
            self._add(n_tokens, max_tokens=1, temperature=0.0)
            started = perf_counter()
            while self._engine.has_work:
                self._engine.step()
            speeds.append(n_tokens / (perf_counter() - started))
        return median(speeds[1:])

    def decode(self, batch: int, temperature: float) -> tuple[float, float]:
        """Seconds of a step in which `batch` sequences decode, and the share of it outside the model."""
        for _ in range(batch):
            self._add(_PROMPT_TOKENS, max_tokens=_DECODE_STEPS + 2 * batch, temperature=temperature)
        seconds, outside = [], []
        while self._engine.has_work:
            before = self._runner.model_seconds
            started = perf_counter()
            _, stats = self._engine.step()
            spent = perf_counter() - started
            if stats.n_decode == batch and not stats.n_prefill_tokens:
                seconds.append(spent)
                outside.append(1 - (self._runner.model_seconds - before) / spent)
        return median(seconds), median(outside)

    def _add(self, n_prompt: int, max_tokens: int, temperature: float) -> None:
        prompt_ids = self._generator.integers(self._config.vocab_size, size=n_prompt).tolist()
        top_p = 0.95 if temperature else 1.0
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        self._engine.add(
            Sequence(
                next(self._ids), prompt_ids, params, frozenset(), SequenceTimes(perf_counter())
            )
        )


def n_weights(config: DecoderConfig) -> int:
    """Parameters that a token is multiplied by: of an embedding that is not the head, a step looks up a row."""
    with torch.device("meta"):
        n_parameters = Decoder(config).n_parameters
    return (
        n_parameters
        if config.tied_embeddings
        else n_parameters - config.vocab_size * config.d_model
    )


def bytes_per_step(
    config: DecoderConfig, precision: str, batch: int, device: Device = "cpu"
) -> float:
    """Weights and, halfway through the measured steps, keys and values that one decode step has to read."""
    of_weight, of_head, of_key = _BYTES[device, precision]
    head = config.vocab_size * config.d_model
    per_token = KVShape(config.n_layer, config.n_kv_head, config.head_dim).token_bytes(of_key)
    weights = of_weight * (n_weights(config) - head) + of_head * head
    return weights + batch * per_token * (_PROMPT_TOKENS + _DECODE_STEPS / 2)


def copy_bandwidth(threads: int) -> float:
    """Bytes read and written per second by `threads` threads that copy large arrays; the median of nine."""
    sources = [np.ones(_COPY_BYTES // threads, dtype=np.uint8) for _ in range(threads)]
    targets = [np.zeros_like(source) for source in sources]
    speeds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            started = perf_counter()
            list(pool.map(np.copyto, targets, sources))
            speeds.append(2 * _COPY_BYTES / (perf_counter() - started))
    return median(speeds)


def device_bandwidth() -> float:
    """Bytes that the GPU reads and writes per second when it copies; the median of nine."""
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return median(2 * source.numel() / _gpu_seconds(lambda: target.copy_(source)) for _ in range(9))


def device_flops() -> float:
    """Operations per second of a large product in bfloat16 on the GPU; the median of nine."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return median(2 * 8192**3 / _gpu_seconds(lambda: a @ a) for _ in range(9))


def _gpu_seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = perf_counter()
    work()
    torch.cuda.synchronize()
    return perf_counter() - started
