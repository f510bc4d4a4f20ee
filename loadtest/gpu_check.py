"""Checks and measurements on an NVIDIA GPU: parity with PyTorch, promises, speed beside a peer.

The most important come first, and every figure is written as it comes, so that a run which ends
early has answered something.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvasir.export.paged_graph import KV_DTYPES
from kvasir.loadtest.bench_engine import DECODE_BATCHES, bench_engine
from kvasir.loadtest.gpu_log import FigureLog
from kvasir.loadtest.gpu_peer import NEW, PROMPT, Peer, answer_speed
from kvasir.loadtest.gpu_promises import check_figures, check_promises, generate
from kvasir.loadtest.gpu_steps import (
    check_memory,
    check_replays,
    measure_copy,
    measure_mixed,
    measure_step,
    open_runner,
)
from kvasir.loadtest.random_model import make_random_model
from kvasir.model.bundle import PRECISIONS, load_bundle
from kvasir.model.presets import preset
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.cuda import require_cuda
from kvasir.server.engine.gpu.session import open_gpu_runner

PRESETS = ("smollm2-135m", "llama3.2-1b")
_CONTEXTS = (512, 8192)
_LONGEST = 16384  # of rows, for the longer contexts and the steps until all sequences decode
_SHOWN = {"max_logit_error", "greedy_agreement", "near_ties", "positions"}
_SHARED_LENGTHS = tuple(range(20, 740, 30))  # of prompts without their shared beginnings
_KV_BYTES = 2**30, 2**28, 2**32  # of a sequence alone, of several with too few, of many
_PACKAGES = ("onnxruntime-gpu", "torch", "transformers", "nvidia-cublas", "nvidia-cudnn-cu13")

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
    {
        "MatMulNBits": {_CUDNN: "0"},
        "fpA_intB products": {_CUDNN: "0", "ORT_FPA_INTB_GEMM": "1"},
    },
)
# Share of tokens as in a sequence's run alone.
_MIN_EQUAL = 0.9


def describe_machine() -> dict[str, Any]:
    """Return the card and the versions. Raises NoDeviceError where no card can be used."""
    require_cuda()
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    driver = "unknown"
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
        driver = result.stdout.strip()
    return {"card": torch.cuda.get_device_name(), "driver": driver, **versions}


def check_parity(
    folder: Path,
    name: str,
    precision: str,
    kv_cache: str | None = None,
    max_model_len: int | None = None,
) -> dict[str, Any]:
    """Export a preset and verify it on the GPU. Raises AssertionError if its results are wrong.

    Figures of 8-bit keys and values have no limits yet.
    """
    make_random_model(
        name, precision, folder, "cuda", kv_cache=kv_cache, max_model_len=max_model_len
    )
    figures = load_bundle(folder).manifest.verification
    if kv_cache is None:
        check_figures(figures, precision)
    return figures.model_dump(include=_SHOWN)


def with_settings(settings: dict[str, str], measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure in an environment; ONNX Runtime reads it when a session is opened."""
    known = dict(os.environ)
    os.environ |= settings
    try:
        return measure(*arguments)
    finally:
        os.environ.clear()
        os.environ |= known


def measure_alone(name: str, precision: str, cache: Path) -> dict[str, Any]:
    """Measure the engine; see `bench_engine`."""
    return asdict(bench_engine(name, precision, None, cache, "cuda"))


def check_engine(folder: Path, smallest: float = _MIN_EQUAL) -> float:
    """Return the share of tokens as in a sequence's run alone; see `check_promises`."""
    bundle = load_bundle(folder)
    longest = min(2048, bundle.config.max_model_len)
    open_one = partial(
        open_gpu_runner, "cuda", bundle.graph_path, bundle.config, max_model_len=longest
    )
    share = check_promises(
        partial(open_one, max_num_seqs=1, kv_cache_bytes=_KV_BYTES[0]),
        partial(open_one, max_num_seqs=16, kv_cache_bytes=_KV_BYTES[1]),
        _SHARED_LENGTHS,
        n_new=32,
        chunk_size=512,
    )
    assert share >= smallest, f"only {share:.1%} of tokens are those of the sequence alone"
    return share


def measure_engine(folder: Path, batch: int) -> float:
    """Return new tokens per second for `batch` simultaneous prompts, prefill included."""
    bundle = load_bundle(folder)
    runner = open_gpu_runner(
        "cuda",
        bundle.graph_path,
        bundle.config,
        max_num_seqs=batch,
        max_model_len=PROMPT + NEW,
        kv_cache_bytes=_KV_BYTES[2],
        keep_prompts=False,
    )
    engine = Engine(runner, chunk_size=2048)
    return answer_speed(batch, runner.vocab_size, lambda prompts: generate(engine, prompts, NEW))


def check_correctness(log: FigureLog, cache: Path) -> None:
    """Compare every precision, and 8-bit keys and values, with PyTorch and with runs alone."""
    first, *others = PRECISIONS["cuda"]
    for precision in (first, *others):
        settings = {_CUDNN: "0"} | (_SAID if precision == first else {})
        for name in PRESETS:
            title, folder = f"{name} {precision}", cache / f"{name}-cuda-{precision}"
            log.note(
                f"{title}: parity", with_settings, settings, check_parity, folder, name, precision
            )
            if precision == first:
                log.note(f"{title}: tokens as alone", with_settings, settings, check_engine, folder)
    batches = DECODE_BATCHES["cuda"]
    for batch in sorted({batches[0], batches[-1]}):
        folder = cache / f"{PRESETS[-1]}-cuda-{first}"
        title = f"{PRESETS[-1]} {first}, batch {batch}: graphs beside eager runs"
        log.note(title, check_replays, folder, batch, _REPLAYED, _KV_BYTES[2])
    for kind in KV_DTYPES:
        name = PRESETS[-1]
        title, folder = f"{name} {first}, keys and values in {kind}", cache / f"{name}-kv-{kind}"
        log.note(f"{title}: figures", check_parity, folder, name, first, kind)
        log.note(f"{title}: tokens as alone", check_engine, folder, 0.0)


def measure_steps(log: FigureLog, cache: Path) -> None:
    """Measure the parts of the largest preset's decode step by context and batch."""
    name, precision = PRESETS[-1], PRECISIONS["cuda"][0]
    folder, batches = cache / f"{name}-long", DECODE_BATCHES["cuda"]
    title = f"{name} {precision}"
    log.note(f"{title}, long rows: parity", check_parity, folder, name, precision, None, _LONGEST)
    for context in _CONTEXTS:
        for batch in batches:
            for how, temperature, captures in _STEPS:
                if temperature and context != _CONTEXTS[0]:
                    continue  # the host's part does not depend on the context

                def measure(
                    batch: int, context: int, temperature: float, captures: bool
                ) -> dict[str, Any]:
                    runner = open_runner(folder, batch, captures=captures)
                    return measure_step(runner, batch, context, temperature)

                part = f"{title}, context {context}, batch {batch}, {how}: step"
                log.note(part, measure, batch, context, temperature, captures)
            part = f"{title}, context {context}, batch {batch}, beside a prompt"
            log.note(f"{part}: step", measure_mixed, folder, batch, context)
    for batch in batches:
        log.note(f"copy of logits, batch {batch}", measure_copy, batch, preset(name).vocab_size)


def compare(log: FigureLog, cache: Path, device: str) -> None:
    """Measure whole answers beside transformers. device: the peer's."""
    for name in PRESETS:
        folder = cache / f"{name}-cuda-{PRECISIONS['cuda'][0]}"
        for batch in DECODE_BATCHES["cuda"]:
            title = f"{name} {PRECISIONS['cuda'][0]}, batch {batch}"
            log.note(f"{title}: kvasir", measure_engine, folder, batch)
            # A new one each time: its first requests set its manager's size.
            for how, run in (("static", Peer.static), ("continuous", Peer.continuous)):

                def measure(name: str, run: Callable[[Peer, int], float], batch: int) -> Any:
                    peer = Peer(preset(name), device)
                    return {"attention": peer.attention, "tokens/s": run(peer, batch)}

                log.note(f"{title}: transformers, {how}", measure, name, run, batch)
            torch.cuda.empty_cache()


def main(cache: Path, output: Path, device: str = "cuda") -> int:
    """Check and measure, the most important first. Returns the number of parts that failed.

    device: of PyTorch, for the peer.
    """
    log = FigureLog(output)
    log.note("machine", describe_machine)
    if log.failures:
        return 1  # without a card nothing else can run
    check_correctness(log, cache)
    first = PRECISIONS["cuda"][0]

    def alone(precision: str) -> None:
        for name in PRESETS:
            for kernels, settings in _KERNELS[precision in ("int8", "int4")].items():
                title = f"{name} {precision}: engine alone, {kernels}"
                log.note(title, with_settings, settings, measure_alone, name, precision, cache)

    alone(first)
    measure_steps(log, cache)
    compare(log, cache, device)
    for precision in PRECISIONS["cuda"][1:]:
        alone(precision)
    log.note("compute-sanitizer", check_memory, cache / f"{PRESETS[0]}-cuda-{first}")
    return len(log.failures)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
