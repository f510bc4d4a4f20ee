"""Benchmarks of the bare engine: decode and prefill speed, the memory-bandwidth roofline, time outside the model.

Random weights of a preset's shape; every figure is a median. The roofline is measured in the same run: a decode step
has to read every weight that takes part and the keys and values of every sequence, and a copy shows how fast memory is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.table import Table

from loadtest.random_model import make_random_model
from model.bundle import GRAPH_FILE
from model.config import DecoderConfig, preset
from model.decoder import Decoder
from server.engine.engine import Engine
from server.engine.kv_rows import KVRows
from server.engine.machine import usable_cpus
from server.engine.runner import OnnxRunner
from server.engine.sampling import SamplingParams
from server.engine.sequence import Sequence, SequenceTimes

DECODE_BATCHES = (1, 4, 16)
PREFILL_TOKENS = (128, 512)
_PROMPT_TOKENS = 128
_DECODE_STEPS = 48
_PREFILL_ROUNDS = 5
_COPY_BYTES = 2**28
_WEIGHT_BYTES = {"fp32": 4.0, "int8": 1.0, "int4": 0.625}  # int4 with a float32 scale for each 32


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Steps in which `batch` sequences decode. roofline: the share of the speed at which memory could feed the step."""

    batch: int
    tokens_per_second: float
    step_milliseconds: float
    roofline: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What `kvasir bench engine` measures. outside: share of a batch-16 step that is not spent inside ONNX Runtime."""

    preset: str
    precision: str
    threads: int
    versions: dict[str, str]
    copy_gigabytes_per_second: float
    decode: list[DecodeFigures]
    prefill_tokens_per_second: dict[int, float]
    outside_greedy: float
    outside_sampled: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[str | Table]:
        machine = f"{self.threads} threads; a copy moves {self.copy_gigabytes_per_second:.1f} GB/s"
        decode = Table(title="decode")
        for name in ("batch", "tokens/s", "step, ms", "of batch 1", "of roofline"):
            decode.add_column(name, justify="right")
        for row in self.decode:
            speed_up = row.tokens_per_second / self.decode[0].tokens_per_second
            cells = (row.batch, f"{row.tokens_per_second:.0f}", f"{row.step_milliseconds:.1f}", f"{speed_up:.1f} x")
            decode.add_row(*map(str, cells), f"{row.roofline:.0%}")
        prefill = Table(title="prefill")
        prefill.add_column("prompt tokens", justify="right")
        prefill.add_column("tokens/s", justify="right")
        for tokens, speed in self.prefill_tokens_per_second.items():
            prefill.add_row(str(tokens), f"{speed:.0f}")
        outside = Table(title=f"batch-{DECODE_BATCHES[-1]} step, share outside the model")
        outside.add_column("greedy", justify="right")
        outside.add_column("temperature 0.8, top-p 0.95", justify="right")
        outside.add_row(f"{self.outside_greedy:.1%}", f"{self.outside_sampled:.1%}")
        return [f"{self.preset}, {self.precision}, {machine}", decode, prefill, outside]


def bench_engine(name: str, precision: str, threads: int | None, cache: Path) -> EngineFigures:
    """Measure the engine on a preset with random weights, which is kept in `cache` for the next time.

    Raises ConfigError for an unknown preset or precision, and the errors of make_random_model.
    """
    graph = make_random_model(name, precision, cache / f"{name}-{precision}") / GRAPH_FILE
    config = preset(name)
    threads = threads or usable_cpus()
    runner = OnnxRunner(graph, config, max_num_seqs=DECODE_BATCHES[-1], threads=threads)
    runner.warm_up()
    bench = _EngineBench(runner, config)
    bandwidth = copy_bandwidth(threads)
    prefill = {tokens: bench.prefill(tokens) for tokens in PREFILL_TOKENS}
    decode = []
    for batch in DECODE_BATCHES:
        seconds, _ = bench.decode(batch, temperature=0.0)
        floor = bytes_per_step(config, precision, batch) / bandwidth
        decode.append(DecodeFigures(batch, batch / seconds, seconds * 1e3, floor / seconds))
    return EngineFigures(
        preset=name,
        precision=precision,
        threads=threads,
        versions={"onnxruntime": version("onnxruntime"), "python": platform.python_version()},
        copy_gigabytes_per_second=bandwidth / 1e9,
        decode=decode,
        prefill_tokens_per_second=prefill,
        outside_greedy=bench.decode(DECODE_BATCHES[-1], temperature=0.0)[1],
        outside_sampled=bench.decode(DECODE_BATCHES[-1], temperature=0.8)[1],
    )


class _EngineBench:
    """One engine under test."""

    def __init__(self, runner: OnnxRunner, config: DecoderConfig) -> None:
        self._runner = runner
        self._config = config
        self._engine = Engine(runner, chunk_size=256)
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
        self._engine.add(Sequence(next(self._ids), prompt_ids, params, frozenset(), SequenceTimes(perf_counter())))


def bytes_per_step(config: DecoderConfig, precision: str, batch: int) -> float:
    """Weights and, halfway through the measured steps, keys and values that one decode step has to read."""
    with torch.device("meta"):
        n_weights = Decoder(config).n_parameters
    table = config.vocab_size * config.d_model
    if not config.tied_embeddings:
        n_weights -= table  # a step looks up a row of it for each sequence
    full = precision == "fp32"
    per_token = KVRows.bytes_per_token(config.n_layer, config.n_kv_head, config.head_dim, itemsize=4 if full else 1)
    weights = _WEIGHT_BYTES[precision] * (n_weights - table) + (4 if full else 1) * table
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
