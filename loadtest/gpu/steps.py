"""Speed on a GPU: whole answers, and a decode step's parts, which are model, kernels and host.

python -m kvasir.loadtest.gpu.steps FOLDER runs one prefill and two decodes, for compute-sanitizer.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from kvasir.loadtest.bench_engine import seconds_of
from kvasir.loadtest.gpu.promises import SkippedError, generate, open_runner
from kvasir.model.directory import load_model_dir
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import BACKENDS
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence, SequenceStatus

_CHUNK = 2048
# Largest difference of logits between graphs and runs without, in standard deviations: kernels may
# differ, so it is that of bfloat16 from PyTorch.
_TOLERANCE = 0.25
_STEPS, _PROFILED = 24, 8
_PROMPT, _NEW = 128, 64  # tokens of an answer's sequence
_ROUNDS = 3  # of answers
_KERNELS = 8  # that are named, the longest first


def start_decodes(
    runner: PagedRunner, batch: int, context: int, n_steps: int, temperature: float = 0.0
) -> Engine:
    """Return an engine in which `batch` sequences decode for n_steps more, after long prompts.

    Raises SkippedError if the blocks do not hold them all.
    """
    n_prefills = batch * (1 + context // _CHUNK)  # steps until all decode, at most
    max_tokens = 2 * n_prefills + n_steps + 2
    needed = batch * runner.kv.reservation(context, max_tokens)
    if needed > runner.kv.budget_tokens:
        raise SkippedError(f"needs blocks of {needed:,} tokens; has {runner.kv.budget_tokens:,}")
    if context + max_tokens > runner.max_model_len:
        raise SkippedError(f"rows of {runner.max_model_len} tokens are too short")
    engine, generator = Engine(runner, chunk_size=_CHUNK), np.random.default_rng(0)
    for i in range(batch):
        prompt = generator.integers(runner.vocab_size, size=context).tolist()
        top_p = 0.95 if temperature else 1.0
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        engine.add(Sequence(i, prompt, params, frozenset(), perf_counter()))
    n_decode = 0
    while n_decode < batch:
        _, stats = engine.step()
        n_decode = 0 if stats.n_prefill_tokens else stats.n_decode
        assert engine.has_work, "the sequences never decoded together"
    return engine


def measure_step(
    folder: Path, batch: int, context: int, temperature: float, *, captures: bool
) -> dict[str, Any]:
    """Return the median parts of a step of decodes; raises as `start_decodes`."""
    runner = open_runner(folder, batch, keep_prompts=False, captures=captures)
    engine = start_decodes(runner, batch, context, _STEPS + _PROFILED, temperature)
    seconds, in_model = [], []
    for _ in range(_STEPS):
        before, started = runner.model_seconds, perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
        in_model.append(runner.model_seconds - before)
    kernels = kernel_milliseconds(engine.step)
    for i in range(batch):
        engine.abort(i)
    step, model = median(seconds), median(in_model)
    return {
        "tokens/s": batch / step,
        "step, ms": step * 1e3,
        "longest step, ms": max(seconds) * 1e3,
        "model, ms": model * 1e3,
        "host, ms": (step - model) * 1e3,
        "GPU busy, ms": sum(kernels.values()),
        "kernels and copies, ms": dict(list(kernels.items())[:_KERNELS]),
        "graphs": _uses_graphs(runner),
    }


def measure_answers(folder: Path, batch: int, **options: Any) -> float:
    """Return new tokens per second for `batch` simultaneous prompts, prefill included."""
    options |= {"max_model_len": _PROMPT + _NEW, "keep_prompts": False}
    runner, generator = open_runner(folder, batch, **options), np.random.default_rng(0)
    chunk_size = BACKENDS[load_model_dir(folder).manifest.device].chunk_size
    engine = Engine(runner, chunk_size=chunk_size)

    def run() -> None:
        prompts = generator.integers(runner.vocab_size, size=(batch, _PROMPT)).tolist()
        lengths = [len(tokens) for tokens in generate(engine, prompts, _NEW)]
        assert lengths == [_NEW] * batch, "an answer ended early"

    return batch * _NEW / median(seconds_of(run, _ROUNDS))


def check_replays(folder: Path, batch: int, n_tokens: int, kv_cache_bytes: int) -> dict[str, float]:
    """Run the same tokens as CUDA graphs and without, and compare the logits of each.

    Raises AssertionError if they differ, or if decodes run without graphs.
    """
    runners = [
        open_runner(folder, batch, kv_cache_bytes=kv_cache_bytes, captures=captures)
        for captures in (True, False)
    ]
    tokens = np.random.default_rng(0).integers(runners[0].vocab_size, size=(batch, n_tokens))
    sequences = [_admit(runner, tokens) for runner in runners]
    differences, n_same, slowest = [], 0, 0.0
    for place in range(n_tokens):
        logits = []
        for runner, held in zip(runners, sequences, strict=True):
            for sequence, ids in zip(held, tokens, strict=True):
                sequence.output_ids = [int(ids[place])]
            before = runner.model_seconds
            decodes = [Chunk(sequence, place, 1, 1) for sequence in held]
            logits.append(runner.run(StepBatch(decodes, [*held]))[:].copy())
            slowest = max(slowest, runner.model_seconds - before)
        replayed, eager = logits
        differences.append(float(np.abs(replayed - eager).max() / eager.std()))
        n_same += int((replayed.argmax(axis=1) == eager.argmax(axis=1)).sum())
    assert _uses_graphs(runners[0]), "decodes ran without graphs"
    worst = max(differences)
    assert worst <= _TOLERANCE, f"logits differ by {worst:.3f} deviations"
    graphs = runners[0].model.graphs
    assert graphs is not None
    return {
        "largest difference, deviations": worst,
        "same greedy tokens": n_same / tokens.size,
        "slowest step, with a capture, ms": 1e3 * slowest,
        "a graph's memory, MiB": graphs.bytes_each / 2**20,
    }


def _admit(runner: PagedRunner, tokens: NDArray[np.int64]) -> list[Sequence]:
    """Return running sequences without tokens, with room for as many as each row has."""
    held = []
    for ids in tokens:
        admitted = runner.kv.admit(len(ids), 0, [])
        assert admitted is not None, "too few blocks"
        params = SamplingParams(max_tokens=1)
        held.append(Sequence(-1, [0], params, frozenset(), 0.0, rows=[admitted[0]]))
        held[-1].status = SequenceStatus.RUNNING
    return held


def _uses_graphs(runner: PagedRunner) -> bool:
    graphs = runner.model.graphs
    return graphs is not None and graphs.is_usable


def kernel_milliseconds(work: Callable[[], object]) -> dict[str, float]:
    """Return the mean time on the GPU by kernel or copy, of all libraries, the longest first."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(_PROFILED):
            work()
    times = [
        (kernel.self_device_time_total / 1e3 / _PROFILED, kernel.key)
        for kernel in profiled.key_averages()
    ]
    return {name: milliseconds for milliseconds, name in sorted(times, reverse=True)}


def check_memory(folder: Path) -> str:
    """Run a prefill and two decodes in compute-sanitizer. Raises AssertionError with its report."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise SkippedError("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", __name__]
    result = subprocess.run(  # noqa: S603  our own command
        [*command, str(folder)], capture_output=True, text=True, check=False
    )
    lines = (result.stdout + result.stderr).splitlines()
    assert result.returncode == 0, "\n".join(lines[-40:])
    return lines[-1]


def run_shortly(folder: Path) -> None:
    """Run one prefill and two decodes."""
    runner = open_runner(folder, 1, kv_cache_bytes=2**26)
    print(generate(Engine(runner, chunk_size=64), [list(range(37))], 3))  # noqa: T201


if __name__ == "__main__":
    run_shortly(Path(sys.argv[1]))
