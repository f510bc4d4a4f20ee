"""All that needs an NVIDIA GPU, in one command: parity with PyTorch, the engine's promises, and speed beside a peer.

`make gpu-check` runs it; it needs no network. The peer is transformers on the same card in the same run, with the same
shape and random weights: `generate` with a static cache, and `generate_batch`, its continuous batching.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import onnxruntime
import torch
import transformers
from rich.console import Console
from rich.table import Table

from export.directory import PRECISIONS
from loadtest.bench_engine import DECODE_BATCHES, bench_engine
from loadtest.random_model import make_random_model
from model.bundle import load_bundle
from model.config import DecoderConfig, preset
from server.engine.cuda import open_cuda_runner
from server.engine.engine import Engine
from server.engine.sampling import SamplingParams
from server.engine.sequence import Sequence, SequenceTimes

PRESETS = ("smollm2-135m", "llama3.2-1b")
_PROMPT, _NEW = 128, 64  # tokens of the peer's sequences
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Parity:
    """What export measured on the GPU, against PyTorch in float32; see `model.bundle.Verification`."""

    preset: str
    precision: str
    max_logit_error: float
    greedy_agreement: float
    perplexity_loss: float


def check_parity(cache: Path, name: str, precision: str) -> Parity:
    """Export a preset, which is verified on the GPU. Raises VerificationError for one that computes something else."""
    folder = make_random_model(name, precision, cache / f"{name}-cuda-{precision}", "cuda")
    figures = load_bundle(folder).manifest.verification
    assert figures.perplexity_onnx is not None
    assert figures.perplexity_torch is not None
    loss = figures.perplexity_onnx / figures.perplexity_torch - 1
    return Parity(name, precision, figures.max_logit_error, figures.greedy_agreement, loss)


def check_engine(cache: Path, name: str, precision: str) -> float:
    """Many sequences at once, prefixes shared, some aborted, too few blocks for all: each ends once, nothing leaks.

    Returns the share of tokens that are those the sequence gets alone. Raises AssertionError for a broken promise.
    """
    bundle = load_bundle(cache / f"{name}-cuda-{precision}")
    generator = np.random.default_rng(0)
    common = generator.integers(bundle.config.vocab_size, size=600).tolist()
    prompts = [
        common[: 256 * (i % 3)] + generator.integers(bundle.config.vocab_size, size=20 + 30 * i).tolist()
        for i in range(24)
    ]
    one = open_cuda_runner(bundle.graph_path, bundle.config, max_num_seqs=1, kv_cache_bytes=2**30, max_model_len=2048)
    alone = [_run(Engine(one, chunk_size=2048), [prompt], set())[0] for prompt in prompts]
    del one
    runner = open_cuda_runner(
        bundle.graph_path, bundle.config, max_num_seqs=16, kv_cache_bytes=2**28, max_model_len=2048
    )
    engine = Engine(runner, chunk_size=512)
    equal = total = 0
    for _ in range(2):  # the second time, prompts begin with blocks that are kept
        together = _run(engine, prompts, aborted={3, 7})
        assert runner.rows.reserved_tokens == 0, "a sequence that has ended still holds blocks"
        assert runner.rows.n_free == runner.rows.max_num_seqs, "a sequence that has ended still holds its row"
        for i, (found, expected) in enumerate(zip(together, alone, strict=True)):
            assert len(found) == len(expected) or i in {3, 7}, "a sequence ended early"
            equal += sum(a == b for a, b in zip(found, expected, strict=False))
            total += len(found)
    return equal / total


def _run(engine: Engine, prompts: list[list[int]], aborted: set[int]) -> list[list[int]]:
    """Greedy tokens of every prompt; those that are aborted are cut off after some."""
    tokens: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=32, temperature=0.0)
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

    def static(self, batch: int) -> float:
        """Decoded tokens per second of `generate` with a static cache, a batch of equal prompts."""
        ids = torch.from_numpy(self._prompts(batch)).to(self._device)

        def run(n_new: int) -> None:
            options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static"}
            self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, **options)

        return batch * (_NEW - 1) / (_median_seconds(lambda: run(_NEW)) - _median_seconds(lambda: run(1)))

    def continuous(self, batch: int) -> float:
        """Decoded tokens per second of `generate_batch`, as many prompts at once."""
        prompts = self._prompts(batch).tolist()

        def run(n_new: int) -> None:
            limits = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            self._model.generate_batch(inputs=prompts, generation_config=limits, progress_bar=False)

        return batch * (_NEW - 1) / (_median_seconds(lambda: run(_NEW)) - _median_seconds(lambda: run(1)))

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


def main(cache: Path, output: Path) -> None:
    """Check, measure, print; the figures go to `output`, too."""
    console = Console()
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    card = torch.cuda.get_device_name()
    console.print(card, versions)
    figures: dict[str, Any] = {"card": card, "versions": versions, "parity": [], "engine": {}, "speed": [], "peer": {}}
    for name in PRESETS:
        for precision in PRECISIONS["cuda"]:
            parity = check_parity(cache, name, precision)
            console.print(parity)
            figures["parity"].append(asdict(parity))
        figures["engine"][name] = check_engine(cache, name, PRECISIONS["cuda"][0])
        console.print(f"{name}: {figures['engine'][name]:.1%} of tokens are those of each sequence alone")
        for precision in PRECISIONS["cuda"]:
            speed = bench_engine(name, precision, None, cache, "cuda")
            console.print(*speed.tables(), sep="\n")
            figures["speed"].append(speed.as_json())
        peer, table = Peer(preset(name)), Table(title=f"transformers, {name}, bf16: decoded tokens/s")
        for column in ("batch", "static", "continuous"):
            table.add_column(column, justify="right")
        figures["peer"][name] = {}
        for batch in DECODE_BATCHES["cuda"]:
            measured = {"static": peer.static(batch), "continuous": peer.continuous(batch)}
            figures["peer"][name][batch] = measured
            table.add_row(str(batch), *(f"{value:.0f}" for value in measured.values()))
        console.print(table)
        del peer
        torch.cuda.empty_cache()
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
