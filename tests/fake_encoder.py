"""An encoder that is a function of the token ids, and a tokenizer that reads pairs."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from model.bundle import EmbeddingDefaults, ModelBundle
from model.config import Pooling, Projection
from server.engine.encoder.sequence import Encoding
from server.engine.sampling import Floats
from server.requests.embedding import EmbeddingRequest
from tests.serving import EOS, fake_bundle, small_tokenizer

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


def encoder_bundle(
    labels: tuple[str, ...] = (), *, max_model_len: int = 64, **pooling: Any
) -> ModelBundle:
    """Return a bundle without files, of an embedding model or, with labels, of a classifier."""
    if labels:
        pooling["projections"] = (Projection(d_out=len(labels)),)
    bundle = fake_bundle(Path("fake-encoder"), max_model_len=max_model_len, chat_template=None)
    config = replace(
        bundle.config,
        causal=False,
        pooling=Pooling(kind="mean", labels=labels, **pooling),
    )
    embedding = EmbeddingDefaults(prompts=PROMPTS)
    return replace(bundle, config=config, tokenizer=pair_tokenizer(), embedding=embedding)


def output_of(encoding: Encoding, output: str, pooling: Pooling) -> Floats:
    """The oracle: [d], [n_tokens, d], or [n_labels]."""
    n = len(pooling.labels) if output == "scores" else D_MODEL
    state = repr((list(encoding.ids), encoding.type_ids and list(encoding.type_ids), output))
    digest = hashlib.blake2b(state.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    shape = (len(encoding.ids), n) if output == "tokens" else (n,)
    values = generator.standard_normal(shape, dtype=np.float32) * 3
    if output == "pooled" and pooling.normalize:
        values /= np.linalg.norm(values)
    return values


class FakeEmbed:
    """The seam of a service; `held` lets no request end while it is cleared."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self.requests: list[EmbeddingRequest] = []
        self.cancelled = 0
        self.begun = asyncio.Event()
        self.held = asyncio.Event()
        self.held.set()

    async def __call__(self, request: EmbeddingRequest) -> list[Floats]:
        self.requests.append(request)
        self.begun.set()
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [output_of(one, request.output, self.pooling) for one in request.inputs]
