"""Speed of whole answers, and of the peer: transformers on the same card in the same run.

The peer has the same shape and random weights: `generate` with a static cache, and `generate_batch`
with its continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from kvasir.loadtest.bench_engine import seconds_of
from kvasir.loadtest.gpu.promises import SkippedError, generate, open_runner
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import load_model_dir
from kvasir.model.presets import preset
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.session import BACKENDS

PROMPT, NEW = 128, 64  # tokens of a sequence
_ROUNDS = 3


def answer_speed(
    batch: int, vocab_size: int, generate: Callable[[list[list[int]]], list[list[int]]]
) -> float:
    """Return new tokens per second of `batch` simultaneous prompts, prefill included."""
    generator = np.random.default_rng(0)

    def run() -> None:
        prompts = generator.integers(vocab_size, size=(batch, PROMPT)).tolist()
        lengths = [len(tokens) for tokens in generate(prompts)]
        assert lengths == [NEW] * batch, "an answer ended early"

    return batch * NEW / median(seconds_of(run, _ROUNDS))


def measure_engine(folder: Path, batch: int, **options: Any) -> float:
    """Return new tokens per second for `batch` simultaneous prompts, prefill included."""
    options |= {"max_model_len": PROMPT + NEW, "keep_prompts": False}
    runner = open_runner(folder, batch, **options)
    chunk_size = BACKENDS[load_model_dir(folder).manifest.device].chunk_size
    engine = Engine(runner, chunk_size=chunk_size)
    return answer_speed(batch, runner.vocab_size, lambda prompts: generate(engine, prompts, NEW))


def measure_peer(name: str, run: Callable[[Peer, int], float], batch: int, device: str) -> Any:
    """Measure a new peer: the first requests of one set the size of its manager."""
    peer = Peer(preset(name), device)
    return {"attention": peer.attention, "tokens/s": run(peer, batch)}


class Peer:
    """The Llama of transformers in a preset's shape, with random bfloat16 weights.

    Raises SkippedError if transformers is not installed.
    """

    def __init__(self, config: TransformerConfig, device: str = "cuda") -> None:
        try:
            transformers: Any = import_module("transformers")
        except ModuleNotFoundError as error:
            raise SkippedError(str(error)) from None
        shape = transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head, head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=config.tied_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self._device = device
        self._make_options = transformers.GenerationConfig
        self._model = transformers.LlamaForCausalLM(shape)
        self._model.to(device, torch.bfloat16).eval()
        self._vocab_size = config.vocab_size
        self.attention = str(self._model.config._attn_implementation)

    def static(self, batch: int) -> float:
        """Return new tokens per second of `generate` with a static cache, prefill included."""
        options = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": NEW}

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            ids = torch.tensor(prompts, device=self._device)
            whole = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            return cast("list[list[int]]", whole[:, PROMPT:].tolist())

        return answer_speed(batch, self._vocab_size, generate)

    def continuous(self, batch: int) -> float:
        """Return new tokens per second of `generate_batch`, prefill included."""
        config = self._make_options(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        options = {"generation_config": config, "progress_bar": False, "persistent_manager": True}

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            results = self._model.generate_batch(inputs=prompts, **options)  # hides its failures
            return [result.generated_tokens for result in results.values()]

        return answer_speed(batch, self._vocab_size, generate)
