"""Checks of a WebGPU adapter: parity with PyTorch, the engine's promises, a stream over HTTP.

python -m kvasir.loadtest.webgpu_check FOLDER checks with a small random model in each precision. A
software adapter is no measure of speed, so speeds are given of hardware alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from kvasir.export.directory import export_checkpoint
from kvasir.loadtest.gpu_promises import check_figures, check_promises, generate
from kvasir.loadtest.random_model import dummy_tokenizer
from kvasir.loadtest.sse_client import Target, complete
from kvasir.model.bundle import PRECISIONS, load_bundle
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.network.transformer import Transformer
from kvasir.model.presets import preset
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.session import block_bytes, open_gpu_runner
from kvasir.server.engine.gpu.webgpu import open_webgpu_session
from kvasir.server.process.local_server import serve_locally

_SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
_N_BLOCKS = 12  # for four sequences of up to three blocks, while nine want some
_MIN_EQUAL = 0.9
_BATCHES, _PROMPT, _NEW = (1, 8), 128, 64


def make_checkpoint(folder: Path) -> Path:
    """Write a random decoder of two layers and three blocks of tokens, unless it is there."""
    run = folder / "run"
    if not run.exists():
        config = replace(preset("tiny"), n_layer=2, max_model_len=640)
        torch.manual_seed(0)
        tokenizer, decoder = dummy_tokenizer(config.vocab_size), Transformer(config)
        with torch.no_grad():  # weights so large that attention matters
            for parameter in decoder.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        save_checkpoint(run, 0, decoder, tokenizer, {}, {})
    return run


def check_parity(run: Path, out: Path, precision: str) -> str:
    """Export for WebGPU, which compares with PyTorch; return the figures."""
    shutil.rmtree(out, ignore_errors=True)
    text = Path(__file__)  # any text measures random weights
    manifest, _ = export_checkpoint(run, out, device="webgpu", precision=precision, text=text)
    figures = manifest.verification
    check_figures(figures, precision)
    return (
        f"{figures.positions} positions, logits within {figures.max_logit_error:.3f} deviations, "
        f"{figures.greedy_agreement:.1%} of greedy tokens equal, {figures.near_ties} near ties"
    )


def check_engine(folder: Path) -> str:
    """Check prompts beside decodes, shared prefixes, aborts and exhausted blocks."""
    bundle = load_bundle(folder)
    session = open_webgpu_session(bundle.graph_path)
    open_runner = partial(
        open_gpu_runner, "webgpu", bundle.graph_path, bundle.config, chunk_size=128
    )
    share = check_promises(
        partial(open_runner, max_num_seqs=1, kv_cache_bytes=3 * block_bytes(session)),
        partial(open_runner, max_num_seqs=4, kv_cache_bytes=_N_BLOCKS * block_bytes(session)),
        (20, 130, 40, 50, 7, 60, 33, 70, 9),
        n_new=12,
        chunk_size=128,
    )
    assert share >= _MIN_EQUAL, f"only {share:.1%} of tokens are those of the sequence alone"
    return f"{share:.1%} of tokens are those of the sequence alone"


def check_stream(folder: Path) -> str:
    """Stream a completion from `kvasir serve`, and return its events."""
    body = {"prompt": "once upon", "max_tokens": 16, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with serve_locally(folder, "--kv-cache-memory", "64MiB", "--max-num-seqs", "2") as url:
        answer = asyncio.run(complete(Target(url), json.dumps(body).encode(), 300))
    assert answer.error is None, answer.error
    assert answer.n_tokens == 16, f"{answer.n_tokens} tokens came"
    return f"{answer.n_tokens} tokens in {len(answer.event_times)} events"


def measure(folder: Path, batch: int) -> str:
    """Return the new tokens per second of `batch` sequences, prefill included."""
    bundle = load_bundle(folder)
    runner = open_gpu_runner(
        "webgpu", bundle.graph_path, bundle.config, max_num_seqs=batch, keep_prompts=False
    )
    engine = Engine(runner, chunk_size=512)
    prompts = [[i + 1] * _PROMPT for i in range(batch)]
    generate(engine, prompts, _NEW)
    started = perf_counter()
    generate(engine, prompts, _NEW)
    return f"{batch * _NEW / (perf_counter() - started):,.0f} tokens/s"


def main(folder: Path) -> None:
    """Check all; raises what a check raises."""
    folder.mkdir(parents=True, exist_ok=True)
    run = make_checkpoint(folder)

    def say(name: str, result: str) -> None:
        print(f"{name}: {result}", flush=True)  # noqa: T201

    for precision in PRECISIONS["webgpu"]:
        say(f"{precision} against PyTorch", check_parity(run, folder / precision, precision))
    whole = folder / PRECISIONS["webgpu"][0]
    say("engine", check_engine(whole))
    say("stream over HTTP", check_stream(whole))
    if _SOFTWARE not in os.environ:
        for batch in _BATCHES:
            say(f"batch {batch}", measure(whole, batch))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
