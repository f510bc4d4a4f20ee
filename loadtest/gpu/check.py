"""Checks and measurements on a GPU: parity with PyTorch, promises, speed.

python -m kvasir.loadtest.gpu.check MODELS FIGURES [--device webgpu] writes random models into the
one folder, and the figures into the other file as they come, the most important first, so that a
run which ends early has answered something.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from rich.console import Console

from kvasir.export.graphs.paged import KV_DTYPES
from kvasir.loadtest.bench_engine import DECODE_BATCHES, bench_engine
from kvasir.loadtest.client import Target, complete
from kvasir.loadtest.gpu.promises import SkippedError, check_figures, check_promises, open_runner
from kvasir.loadtest.gpu.steps import (
    check_memory,
    check_replays,
    measure_answers,
    measure_step,
)
from kvasir.loadtest.random_model import folder_name, make_random_model
from kvasir.model.directory import KV_BLOCK_SIZE, PRECISIONS, Device, load_model_dir
from kvasir.server.engine.gpu.session import BACKENDS
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.process.local_server import serve_locally

PRESETS = ("smollm2-135m", "llama3.2-1b")
_CONTEXTS = (512, 8192)
_LONGEST = 16384  # of rows, for the longer contexts and the steps until all sequences decode
_KV_BYTES = 2**32  # of many sequences
_PACKAGES = (
    *("onnxruntime-gpu", "onnxruntime", "onnxruntime-ep-webgpu"),
    *("torch", "nvidia-cublas", "nvidia-cudnn-cu13"),
)
_SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
# A decoder for WebGPU that a software adapter can bear; its rows have up to three blocks.
_SMALL = {"scale": 3, "n_layer": 2, "max_model_len": 640}

# Decode steps to measure: name, temperature, as CUDA graphs. A nucleus of random logits is as small
# as a trained model's at a low temperature; at others it takes whole rows.
_STEPS = (
    ("greedy", 0.0, True),
    ("greedy, no graphs", 0.0, False),
    ("top-p 0.95", 0.05, True),
    ("top-p 0.95 of whole rows", 0.8, True),
)
_REPLAYED = 300  # tokens, over a block's end

_CUDNN = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"
_SAID = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}  # prints the kernel that attention takes
# Environments to measure in, without and with rounded weights. PyTorch brings a cuDNN, which the
# image lacks; with it PagedAttention may choose another kernel.
_KERNELS: tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]] = (
    {"cuDNN's attention off": {_CUDNN: "0"}, "cuDNN's attention on": {_CUDNN: "1"}},
    {"MatMulNBits": {_CUDNN: "0"}, "fpA_intB products": {_CUDNN: "0", "ORT_FPA_INTB_GEMM": "1"}},
)


class Sequences(NamedTuple):
    """Sequences that are run alone and then together.

    lengths: of prompts without their shared beginnings. n_blocks: of a sequence alone, and of
    `max_num_seqs` together, which are too few.
    """

    lengths: tuple[int, ...]
    n_blocks: tuple[int, int]
    max_num_seqs: int
    n_new: int
    chunk_size: int


_SEQUENCES = {
    "cuda": Sequences(tuple(range(20, 740, 30)), (8, 32), 16, 32, 512),
    "webgpu": Sequences((20, 130, 40, 50, 7, 60, 33, 70, 9), (3, 12), 4, 12, 128),
}


class FigureLog:
    """Figures on the screen and in a file as they come. A failure costs only its own figure."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    def note(
        self, name: str, measure: Callable[..., Any], *arguments: Any, **settings: str
    ) -> None:
        """Measure something in an environment, or note why that failed or was skipped.

        ONNX Runtime reads its environment when a session is opened.
        """
        try:
            with patch.dict(os.environ, settings):
                figure = measure(*arguments)
        except SkippedError as reason:
            figure = {"skipped": str(reason)}
        except Exception as error:  # a card or a driver may raise anything
            self.failures.append(name)
            figure = {"failed": f"{type(error).__name__}: {error}"}
        self.figures[name] = figure
        Console().print(name, figure, markup=False)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.figures, indent=2, default=asdict)
        self._output.write_text(f"{text}\n", encoding="utf-8")


def describe_machine(device: Device) -> dict[str, Any]:
    """Return the card and the versions. Raises NoDeviceError where no card can be used."""
    BACKENDS[device].require()
    about = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            about[package] = version(package)
    if device == "cuda":
        about["card"] = torch.cuda.get_device_name()
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
        about["driver"] = result.stdout.strip()
    return about


def check_parity(folder: Path, name: str, precision: str, device: Device, **shape: Any) -> Any:
    """Export a preset and verify it on the GPU. Raises AssertionError if its results are wrong.

    Figures of 8-bit keys and values have no limits yet.
    """
    make_random_model(name, precision, folder, device, **shape)
    figures = load_model_dir(folder).manifest.verification
    if "kv_cache" not in shape:
        check_figures(figures, precision)
    shown = {"max_logit_error", "greedy_agreement", "near_ties", "positions"}
    return figures.model_dump(include=shown)


def check_engine(folder: Path, smallest: float = 0.9) -> float:
    """Return the share of tokens as in the sequence's run alone; see `check_promises`."""
    model_dir = load_model_dir(folder)
    config, sequences = model_dir.config, _SEQUENCES[model_dir.manifest.device]
    shape = KVShape(*config.cache_shape)
    alone, together = (n * KV_BLOCK_SIZE * shape.token_bytes(2) for n in sequences.n_blocks)
    longest = min(2048, config.max_model_len)
    options = {"max_model_len": longest, "chunk_size": sequences.chunk_size}
    share = check_promises(
        partial(open_runner, folder, 1, kv_cache_bytes=alone, **options),
        partial(open_runner, folder, sequences.max_num_seqs, kv_cache_bytes=together, **options),
        sequences.lengths,
        n_new=sequences.n_new,
        chunk_size=sequences.chunk_size,
    )
    assert share >= smallest, f"only {share:.1%} of tokens after equal ones are as alone"
    return share


def check_stream(folder: Path) -> str:
    """Stream a completion from `kvasir serve`, and return its events."""
    body = {"prompt": "once upon", "max_tokens": 16, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with serve_locally(folder, "--kv-cache-memory", "64MiB", "--max-num-seqs", "2") as url:
        answer = asyncio.run(complete(Target(url), json.dumps(body).encode(), 300))
    assert answer.error is None, answer.error
    assert answer.n_tokens == 16, f"{answer.n_tokens} tokens came"
    return f"{answer.n_tokens} tokens in {len(answer.event_times)} events"


def check_webgpu(log: FigureLog, cache: Path) -> None:
    """Check every precision and a stream; measure hardware, since software says nothing of it."""
    for precision in PRECISIONS["webgpu"]:
        folder = cache / folder_name("tiny", precision, "webgpu")
        shutil.rmtree(folder, ignore_errors=True)  # another adapter may have verified it
        check = partial(check_parity, folder, "tiny", precision, "webgpu", **_SMALL)
        log.note(f"{precision}: parity", check)
    folder = cache / folder_name("tiny", PRECISIONS["webgpu"][0], "webgpu")
    log.note("tokens as alone", check_engine, folder)
    log.note("stream over HTTP", check_stream, folder)
    for batch in () if _SOFTWARE in os.environ else (1, 8):
        log.note(f"batch {batch}, tokens/s", measure_answers, folder, batch)


def check_cuda(log: FigureLog, cache: Path) -> None:
    """Compare every precision, and 8-bit keys and values, with PyTorch and with runs alone."""
    first, last = PRECISIONS["cuda"][0], PRESETS[-1]
    for precision in PRECISIONS["cuda"]:
        settings = {_CUDNN: "0"} | (_SAID if precision == first else {})
        for name in PRESETS:
            title, folder = f"{name} {precision}", cache / folder_name(name, precision, "cuda")
            parity = partial(check_parity, folder, name, precision, "cuda")
            log.note(f"{title}: parity", parity, **settings)
            if precision == first:
                log.note(f"{title}: tokens as alone", check_engine, folder, **settings)
    folder, batches = cache / folder_name(last, first, "cuda"), DECODE_BATCHES["cuda"]
    for batch in sorted({batches[0], batches[-1]}):
        title = f"{last} {first}, batch {batch}: graphs beside eager runs"
        log.note(title, check_replays, folder, batch, _REPLAYED, _KV_BYTES)
    for kind in KV_DTYPES:
        title, folder = f"{last} {first}, keys and values in {kind}", cache / f"{last}-kv-{kind}"
        parity = partial(check_parity, folder, last, first, "cuda", kv_cache=kind)
        log.note(f"{title}: figures", parity)
        log.note(f"{title}: tokens as alone", check_engine, folder, 0.0)


def measure_alone(log: FigureLog, cache: Path, precision: str) -> None:
    """Measure the engine in a precision with each choice of kernels; see `bench_engine`."""
    for name in PRESETS:
        for kernels, settings in _KERNELS[precision in ("int8", "int4")].items():
            title = f"{name} {precision}: engine alone, {kernels}"
            log.note(title, bench_engine, name, precision, None, cache, "cuda", **settings)


def measure_speed(log: FigureLog, cache: Path) -> None:
    """Measure the parts of the largest preset's decode step, and the whole answers of each."""
    name, precision = PRESETS[-1], PRECISIONS["cuda"][0]
    folder, title = cache / f"{name}-long", f"{name} {precision}"
    parity = partial(check_parity, folder, name, precision, "cuda", max_model_len=_LONGEST)
    log.note(f"{title}, long rows: parity", parity)
    for context in _CONTEXTS:
        for batch in DECODE_BATCHES["cuda"]:
            part = f"{title}, context {context}, batch {batch}"
            for how, temperature, captures in _STEPS:
                # The host's part does not depend on the context.
                if not temperature or context == _CONTEXTS[0]:
                    measure = partial(measure_step, captures=captures)
                    log.note(f"{part}, {how}: step", measure, folder, batch, context, temperature)
    answers = partial(measure_answers, kv_cache_bytes=_KV_BYTES)
    for preset, batch in product(PRESETS, DECODE_BATCHES["cuda"]):
        folder = cache / folder_name(preset, precision, "cuda")
        log.note(f"{preset} {precision}, batch {batch}: answers, tokens/s", answers, folder, batch)


def check(cache: Path, output: Path, device: Device = "cuda") -> list[str]:
    """Check and measure, the most important first. Returns the parts that failed."""
    log = FigureLog(output)
    log.note("machine", describe_machine, device)
    if log.failures:
        return log.failures  # without a card nothing else can run
    if device == "webgpu":
        check_webgpu(log, cache)
        return log.failures
    first, *rounded = PRECISIONS["cuda"]
    check_cuda(log, cache)
    measure_alone(log, cache, first)
    measure_speed(log, cache)
    for precision in rounded:
        measure_alone(log, cache, precision)
    log.note("compute-sanitizer", check_memory, cache / folder_name(PRESETS[0], first, "cuda"))
    return log.failures


def main(models: Path, figures: Path, device: Device = "cuda") -> None:
    """Check a GPU; exit code 1 if a part failed."""
    raise typer.Exit(int(bool(check(models, figures, device))))


if __name__ == "__main__":
    typer.run(main)
