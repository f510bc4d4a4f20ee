"""Checks and measurements on an NVIDIA GPU: parity with PyTorch, promises, speed beside a peer.

The peer is transformers on the same card in the same run, with the same shape and random weights:
`generate` with a static cache, and `generate_batch` with its continuous batching.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import transformers
from rich.console import Console

from loadtest.bench_engine import DECODE_BATCHES, bench_engine, median_seconds
from loadtest.random_model import make_random_model
from model.bundle import PRECISIONS, load_bundle
from model.config import TransformerConfig, preset
from model.onnx.runtime import onnxruntime
from server.engine.cuda.session import open_cuda_runner
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import Sequence

PRESETS = ("smollm2-135m", "llama3.2-1b")
_PROMPT, _NEW = 128, 64  # tokens of the peer's sequences
_ROUNDS = 3
_ABORTED = frozenset({3, 7})

# Largest difference of logits from PyTorch's in float32, in standard deviations, and smallest share
# of equal greedy tokens. Perplexity cannot test random weights: no attention at all would pass.
_LIMITS = {"bf16": (0.25, 0.95), "fp16": (0.05, 0.98), "int8": (0.35, 0.9), "int4": (3.0, 0.35)}
# Share of tokens as in a sequence's run alone. After one difference, all may differ.
_MIN_EQUAL = 0.9


def check_parity(folder: Path, name: str, precision: str) -> dict[str, float]:
    """Export a preset and verify it on the GPU. Raises AssertionError if its results are wrong."""
    make_random_model(name, precision, folder, "cuda")
    figures = load_bundle(folder).manifest.verification
    error, agreement = figures.max_logit_error, figures.greedy_agreement
    largest, smallest = _LIMITS[precision]
    assert error < largest, f"logits differ by {error:.3f} deviations"
    assert agreement >= smallest, f"only {agreement:.1%} of greedy tokens are PyTorch's"
    return {"max_logit_error": error, "greedy_agreement": agreement}


def check_engine(folder: Path) -> float:
    """Run many sequences with shared prefixes and too few blocks, and abort some of them.

    Returns the share of tokens equal to the sequence's alone. Raises AssertionError if that is too
    small, a sequence does not end exactly once, or anything leaks.
    """
    bundle = load_bundle(folder)
    vocab_size, generator = bundle.config.vocab_size, np.random.default_rng(0)
    common, *rests = (
        generator.integers(vocab_size, size=n).tolist() for n in (600, *range(20, 740, 30))
    )
    prompts = [common[: 256 * (i % 3)] + rest for i, rest in enumerate(rests)]
    open_runner = partial(open_cuda_runner, bundle.graph_path, bundle.config, max_model_len=2048)
    one = open_runner(max_num_seqs=1, kv_cache_bytes=2**30)
    alone = [_generate(Engine(one, chunk_size=2048), [prompt], 32)[0] for prompt in prompts]
    del one
    runner = open_runner(max_num_seqs=16, kv_cache_bytes=2**28)
    engine = Engine(runner, chunk_size=512)
    equal = total = 0
    for _ in range(2):  # the second time, the blocks of the prompts' beginnings are cached
        together = _generate(engine, prompts, 32, _ABORTED)
        assert runner.kv.reserved_tokens == 0, "an ended sequence still holds blocks"
        n_held = runner.kv.max_num_seqs - len(runner.kv.free_rows)
        assert n_held == 0, f"ended sequences still hold {n_held} rows"
        for i, (found, expected) in enumerate(zip(together, alone, strict=True)):
            assert len(found) == len(expected) or i in _ABORTED, "a sequence ended early"
            equal += sum(a == b for a, b in zip(found, expected, strict=False))
            total += len(found)
    share = equal / total
    assert share >= _MIN_EQUAL, f"only {share:.1%} of tokens are those of the sequence alone"
    return share


def measure_engine(folder: Path, batch: int) -> float:
    """Return new tokens per second for `batch` simultaneous prompts, prefill included."""
    bundle = load_bundle(folder)
    limits = {"max_num_seqs": batch, "max_model_len": _PROMPT + _NEW, "kv_cache_bytes": 2**32}
    runner = open_cuda_runner(bundle.graph_path, bundle.config, **limits, keep_prompts=False)
    engine = Engine(runner, chunk_size=2048)
    return _speed(batch, runner.vocab_size, lambda prompts: _generate(engine, prompts, _NEW))


def _speed(
    batch: int, vocab_size: int, generate: Callable[[list[list[int]]], list[list[int]]]
) -> float:
    generator = np.random.default_rng(0)

    def run() -> None:
        prompts = generator.integers(vocab_size, size=(batch, _PROMPT)).tolist()
        lengths = [len(tokens) for tokens in generate(prompts)]
        assert lengths == [_NEW] * batch, "an answer ended early"

    return batch * _NEW / median_seconds(run, _ROUNDS)


def _generate(
    engine: Engine, prompts: list[list[int]], n_new: int, aborted: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Return the greedy tokens of every prompt; abort those numbered in `aborted` after five."""
    tokens: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=n_new, temperature=0.0)
        engine.add(Sequence(i, prompt, params, frozenset(), perf_counter()))
    while engine.has_work:
        for output in engine.step()[0]:
            assert output.sequence_id not in ended, "an output after the last one"
            if output.token_id is not None:
                tokens[output.sequence_id].append(output.token_id)
            if output.finish_reason is not None:
                ended.add(output.sequence_id)
        ended |= {i for i in aborted - ended if len(tokens[i]) >= 5 and engine.abort(i)}
    assert len(ended) == len(prompts), "a sequence never ended"
    return tokens


class Peer:
    """The Llama of transformers in a preset's shape, with random bfloat16 weights."""

    def __init__(self, config: TransformerConfig, device: str = "cuda") -> None:
        shape = transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head, head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=config.tied_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self._device = device
        self._model = cast("Any", transformers.LlamaForCausalLM(shape))
        self._model.to(device, torch.bfloat16).eval()
        self._vocab_size = config.vocab_size
        self.attention = str(self._model.config._attn_implementation)

    def static(self, batch: int) -> float:
        """Return new tokens per second of `generate` with a static cache, prefill included."""
        options = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": _NEW}

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            ids = torch.tensor(prompts, device=self._device)
            found = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            return cast("list[list[int]]", found[:, _PROMPT:].tolist())

        return _speed(batch, self._vocab_size, generate)

    def continuous(self, batch: int) -> float:
        """Return new tokens per second of `generate_batch`, prefill included."""
        config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        options = {"generation_config": config, "progress_bar": False, "persistent_manager": True}

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            found = self._model.generate_batch(inputs=prompts, **options)  # hides its failures
            return [result.generated_tokens for result in found.values()]

        return _speed(batch, self._vocab_size, generate)


class FigureLog:
    """Figures on the screen and in a file as they come. A failure costs only its own figure."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    def note(self, name: str, measure: Callable[..., Any], *arguments: Any) -> None:
        """Measure something, or note why that failed."""
        try:
            found = measure(*arguments)
        except Exception as error:  # a card, a driver or a peer may raise anything
            self.failures.append(name)
            found = {"failed": f"{type(error).__name__}: {error}"}
        self.figures[name] = found
        Console().print(name, found, markup=False)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")


def main(cache: Path, output: Path) -> int:
    """Check and measure, the most important first. Returns the number of parts that failed."""
    log = FigureLog(output)
    versions = {one.__name__: one.__version__ for one in (onnxruntime, torch, transformers)}
    versions["python"] = platform.python_version()
    log.note("machine", lambda: {"card": torch.cuda.get_device_name(), **versions})
    batches = DECODE_BATCHES["cuda"]
    for precision in PRECISIONS["cuda"]:
        for name in PRESETS:
            title, folder = f"{name} {precision}", cache / f"{name}-cuda-{precision}"
            log.note(f"{title}: parity", check_parity, folder, name, precision)
            bench = partial(bench_engine, name, precision, None, cache, "cuda")
            log.note(f"{title}: engine alone", lambda measure=bench: asdict(measure()))
            if precision != PRECISIONS["cuda"][0]:
                continue
            log.note(f"{title}: tokens as alone", check_engine, folder)
            for batch in batches:
                log.note(f"{title}, batch {batch}: kvasir", measure_engine, folder, batch)
            for batch in batches:
                peer = Peer(preset(name))  # a new one: its first requests set its manager's size
                title = f"{name}, batch {batch}: transformers, {peer.attention}"
                log.note(f"{title}, static", peer.static, batch)
                log.note(f"{title}, continuous", peer.continuous, batch)
                torch.cuda.empty_cache()
    return len(log.failures)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
