"""All that needs an NVIDIA GPU, in one command: parity with PyTorch, the engine's promises, and speed beside a peer.

`make gpu-check` runs it; it needs no network. The peer is transformers on the same card in the same run, with the same
shape and random weights: `generate` with a static cache, and `generate_batch`, its continuous batching.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import onnxruntime
import torch
import transformers
from rich.console import Console

from loadtest.bench_engine import DECODE_BATCHES, bench_engine
from loadtest.random_model import make_random_model
from model.bundle import PRECISIONS, load_bundle
from model.config import DecoderConfig, preset
from server.engine.cuda.session import open_cuda_runner
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import Sequence, SequenceTimes

PRESETS = ("smollm2-135m", "llama3.2-1b")
_PROMPT, _NEW = 128, 64  # tokens of the peer's sequences
_ROUNDS = 3


# Largest difference of logits, relative to their standard deviation, and smallest share of greedy tokens that are
# PyTorch's in float32. Perplexity says nothing of random weights: a graph without attention would pass.
_LIMITS = {"bf16": (0.25, 0.97), "fp16": (0.05, 0.99), "int8": (0.35, 0.95), "int4": (3.0, 0.5)}
_MIN_EQUAL = 0.9  # of tokens beside others that are those of the sequence alone; after one that differs, all may


def check_parity(cache: Path, name: str, precision: str) -> dict[str, float]:
    """Export a preset, which is verified on the GPU. Raises AssertionError for one that computes something else."""
    folder = make_random_model(name, precision, cache / f"{name}-cuda-{precision}", "cuda")
    figures = load_bundle(folder).manifest.verification
    largest, smallest = _LIMITS[precision]
    assert figures.max_logit_error < largest, (
        f"logits differ by {figures.max_logit_error:.3f} deviations"
    )
    assert figures.greedy_agreement >= smallest, (
        f"only {figures.greedy_agreement:.1%} of greedy tokens are PyTorch's"
    )
    return {
        "max_logit_error": figures.max_logit_error,
        "greedy_agreement": figures.greedy_agreement,
    }


def check_engine(cache: Path, name: str, precision: str) -> float:
    """Many sequences at once, prefixes shared, some aborted, too few blocks for all: each ends once, nothing leaks.

    Returns the share of tokens that are those the sequence gets alone. Raises AssertionError for a broken promise.
    """
    bundle = load_bundle(cache / f"{name}-cuda-{precision}")
    generator = np.random.default_rng(0)
    common = generator.integers(bundle.config.vocab_size, size=600).tolist()
    prompts = [
        common[: 256 * (i % 3)]
        + generator.integers(bundle.config.vocab_size, size=20 + 30 * i).tolist()
        for i in range(24)
    ]
    one = open_cuda_runner(
        bundle.graph_path, bundle.config, max_num_seqs=1, kv_cache_bytes=2**30, max_model_len=2048
    )
    alone = [_run(Engine(one, chunk_size=2048), [prompt], set())[0] for prompt in prompts]
    del one
    runner = open_cuda_runner(
        bundle.graph_path, bundle.config, max_num_seqs=16, kv_cache_bytes=2**28, max_model_len=2048
    )
    engine = Engine(runner, chunk_size=512)
    equal = total = 0
    for _ in range(2):  # the second time, prompts begin with blocks that are kept
        together = _run(engine, prompts, aborted={3, 7})
        assert runner.kv.reserved_tokens == 0, "a sequence that has ended still holds blocks"
        assert len(runner.kv.free_rows) == runner.kv.max_num_seqs, (
            "a sequence that has ended still holds its row"
        )
        for i, (found, expected) in enumerate(zip(together, alone, strict=True)):
            assert len(found) == len(expected) or i in {3, 7}, "a sequence ended early"
            equal += sum(a == b for a, b in zip(found, expected, strict=False))
            total += len(found)
    assert equal >= _MIN_EQUAL * total, (
        f"only {equal / total:.1%} of tokens are those of the sequence alone"
    )
    return equal / total


def measure_engine(cache: Path, name: str, precision: str, batch: int) -> float:
    """New tokens per second of `batch` prompts that come at once, prefill and all, as the peer's are counted."""
    bundle = load_bundle(cache / f"{name}-cuda-{precision}")
    generator = np.random.default_rng(0)
    runner = open_cuda_runner(
        bundle.graph_path,
        bundle.config,
        max_num_seqs=batch,
        max_model_len=_PROMPT + _NEW,
        kv_cache_bytes=2**32,
        keep_prompts=False,
    )
    engine = Engine(runner, chunk_size=2048)

    def run() -> None:
        prompts = generator.integers(bundle.config.vocab_size, size=(batch, _PROMPT)).tolist()
        assert all(len(tokens) == _NEW for tokens in _run(engine, prompts, set(), _NEW))

    return batch * _NEW / _median_seconds(run)


def _run(
    engine: Engine, prompts: list[list[int]], aborted: set[int], n_new: int = 32
) -> list[list[int]]:
    """Greedy tokens of every prompt; those that are aborted are cut off after some."""
    tokens: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=n_new, temperature=0.0)
        engine.add(Sequence(i, prompt, params, frozenset(), SequenceTimes(perf_counter())))
    while engine.has_work:
        for output in engine.step()[0]:
            assert output.sequence_id not in ended, "an output after the last one"
            if output.token_id is not None:
                tokens[output.sequence_id].append(output.token_id)
            if output.finish_reason is not None:
                ended.add(output.sequence_id)
        for i in aborted - ended:
            if len(tokens[i]) >= 5 and engine.abort(i):
                ended.add(i)
    assert len(ended) == len(prompts), "a sequence never ended"
    return tokens


class Peer:
    """transformers' Llama of a preset's shape, with random weights in bfloat16."""

    def __init__(self, config: DecoderConfig, device: str = "cuda") -> None:
        shape = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=config.tied_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self._device = device
        self._model = cast("Any", transformers.LlamaForCausalLM(shape))
        self._model.to(device, torch.bfloat16).eval()
        self._generator = np.random.default_rng(0)
        self._vocab_size = config.vocab_size

    @property
    def attention(self) -> str:
        """Which implementation transformers has chosen."""
        return str(self._model.config._attn_implementation)

    def static(self, batch: int) -> float:
        """New tokens per second of `generate` with a static cache, a batch of equal prompts, prefill and all."""
        ids = torch.from_numpy(self._prompts(batch)).to(self._device)

        def run() -> None:
            options: dict[str, Any] = {
                "do_sample": False,
                "cache_implementation": "static",
                "max_new_tokens": _NEW,
            }
            found = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert found.shape[1] == _PROMPT + _NEW, "generate ended early"

        return batch * _NEW / _median_seconds(run)

    def continuous(self, batch: int) -> float:
        """New tokens per second of `generate_batch`, as many prompts at once, prefill and all."""
        prompts = self._prompts(batch).tolist()
        limits = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

        def run() -> None:
            options = {
                "generation_config": limits,
                "progress_bar": False,
                "persistent_manager": True,
            }
            found = self._model.generate_batch(inputs=prompts, **options)
            lengths = [len(result.generated_tokens) for result in found.values()]
            assert lengths == [_NEW] * batch, (
                "generate_batch ended early"
            )  # it returns what it has when it fails

        return batch * _NEW / _median_seconds(run)

    def _prompts(self, batch: int) -> Any:
        return self._generator.integers(self._vocab_size, size=(batch, _PROMPT))


def _median_seconds(work: Callable[[], None]) -> float:
    """Of a few runs after one that warms up; what a GPU was given is waited for."""
    work()
    seconds = []
    for _ in range(_ROUNDS):
        started = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
    return median(seconds)


class Report:
    """Figures as they come, on the screen and in a file: a failure costs its own, and none of the others."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._console = Console()
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    def note(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure something, or note why it could not be."""
        try:
            found = measure()
        except Exception as error:  # whatever a card, a driver or a peer comes up with
            self.failures.append(name)
            found = {"failed": f"{type(error).__name__}: {error}"}
        self.figures[name] = found
        self._console.print(name, found, markup=False)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")


def main(cache: Path, output: Path) -> int:
    """Check and measure, what matters most first. Returns how many of the parts failed."""
    report, first = Report(output), PRECISIONS["cuda"][0]
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    report.note("machine", lambda: {"card": torch.cuda.get_device_name(), **versions})
    for precision in (first, *PRECISIONS["cuda"][1:]):
        for name in PRESETS:
            report.note(
                f"{name} {precision}: parity", partial(check_parity, cache, name, precision)
            )
            report.note(
                f"{name} {precision}: engine alone", partial(_figures, name, precision, cache)
            )
            if precision != first:
                continue
            report.note(
                f"{name} {precision}: tokens as alone",
                partial(check_engine, cache, name, precision),
            )
            for batch in DECODE_BATCHES["cuda"]:
                ours = partial(measure_engine, cache, name, precision, batch)
                report.note(f"{name} {precision}, batch {batch}: kvasir", ours)
            _measure_peer(report, name)
    return len(report.failures)


def _figures(name: str, precision: str, cache: Path) -> dict[str, Any]:
    return bench_engine(name, precision, None, cache, "cuda").as_json()


def _measure_peer(report: Report, name: str) -> None:
    for batch in DECODE_BATCHES["cuda"]:
        peer = Peer(
            preset(name)
        )  # a new one each time: its manager is sized for the first requests that it gets
        report.note(
            f"{name}, batch {batch}: transformers, {peer.attention}, static",
            partial(peer.static, batch),
        )
        report.note(
            f"{name}, batch {batch}: transformers, {peer.attention}, continuous",
            partial(peer.continuous, batch),
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
