"""An encoder that is a function of the token ids, and a tokenizer that reads pairs."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvasir.model.config import Pooling
from kvasir.model.configuration.parts import Projection
from kvasir.model.directory import ModelDirectory
from kvasir.model.records import EmbeddingDefaults
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.encoder.runner import EncoderRunner
from kvasir.server.engine.encoder.sequence import EncoderSequence, Encoding
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.process.app import create_app
from kvasir.server.settings import load_settings
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import EOS, fake_model_dir, small_tokenizer

D_MODEL = 16
PROMPTS = {"query": "find: ", "passage": ""}


@cache
def pair_tokenizer() -> Tokenizer:
    """Return the tokenizer of the fakes with BERT's special tokens, which are one token here."""
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>",
        pair="<|endoftext|> $A <|endoftext|> $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", EOS)],
    )
    return tokenizer


def encoder_model_dir(
    labels: tuple[str, ...] = (), *, max_model_len: int = 64, **pooling: Any
) -> ModelDirectory:
    """Return a model without files: of embeddings or, with labels, a classifier."""
    if labels:
        pooling["projections"] = (Projection(d_out=len(labels)),)
    model_dir = fake_model_dir(
        Path("fake-encoder"), max_model_len=max_model_len, chat_template=None
    )
    config = replace(
        model_dir.config,
        causal=False,
        pooling=Pooling(kind="mean", labels=labels, **pooling),
    )
    embedding = EmbeddingDefaults(prompts=PROMPTS)
    return replace(model_dir, config=config, tokenizer=pair_tokenizer(), embedding=embedding)


def output_of(encoding: Encoding, pooling: Pooling, *, tokens: bool = False) -> Floats:
    """The oracle: a vector [d] or scores [n_labels]; of all tokens, [n_tokens, d]."""
    n = D_MODEL if tokens else len(pooling.labels) or D_MODEL
    state = repr((list(encoding.ids), encoding.type_ids and list(encoding.type_ids), tokens))
    digest = hashlib.blake2b(state.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    shape = (len(encoding.ids), n) if tokens else (n,)
    values = generator.standard_normal(shape, dtype=np.float32) * 3
    if pooling.normalize and not tokens:
        values /= np.linalg.norm(values)
    return values


class FakeTextRunner(EncoderRunner):
    """A model of texts, whose runs a test can hold."""

    max_runs = 1

    def __init__(self, pooling: Pooling, *, max_model_len: int = 64) -> None:
        self.pooling, self.max_model_len = pooling, max_model_len
        self.batches: list[list[EncoderSequence]] = []
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def run(self, texts: list[EncoderSequence], *, alone: bool = True) -> list[Floats]:  # noqa: ARG002
        self.batches.append(texts)
        self.begun.set()
        assert self.gate.wait(TIMEOUT)
        return [
            output_of(
                Encoding(text.prompt_ids, text.type_ids), self.pooling, tokens=text.wants_tokens
            )
            for text in texts
        ]

    @property
    def texts(self) -> list[EncoderSequence]:
        return [text for batch in self.batches for text in batch]

    def release_idle_memory(self) -> None:
        """There is none."""


def encoder_app(model_dir: ModelDirectory, **settings: Any) -> tuple[FastAPI, FakeTextRunner]:
    """Return the app of a fake encoder, and its runner."""
    assert model_dir.config.pooling is not None
    runner = FakeTextRunner(model_dir.config.pooling, max_model_len=model_dir.config.max_model_len)
    known = load_settings(model=model_dir.path, **settings)
    engine = EncoderEngine(runner, token_budget=100, max_num_seqs=4)
    return create_app(known, model_dir, engine), runner
