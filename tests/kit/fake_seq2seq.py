"""A small random encoder-decoder in PyTorch, as a Runner that keeps token ids in its rows.

It reads sources and targets back from there, so a row that was wrongly copied, moved or overwritten
shows in the logits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Lstm
from kvasir.model.network.cross_attention import Source
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import next_logits
from kvasir.server.engine.batch import StepBatch
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.source_rows import SourceRows
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import Floats

EOS = 2


def small_config(target_prefix: tuple[int, ...] = (3,), vocab_size: int = 60) -> TransformerConfig:
    shape: dict[str, Any] = {"n_head": 2, "n_kv_head": 2, "head_dim": 8, "d_model": 16, "d_ff": 32}
    shape |= {"vocab_size": vocab_size, "n_layer": 2, "feed_forward": "relu"}
    encoder = TransformerConfig(**shape, max_model_len=24, causal=False, position="sinusoidal")
    return TransformerConfig(
        **shape,
        max_model_len=20,
        position="sinusoidal",
        encoder=encoder,
        target_prefix=target_prefix,
        eos_token_ids=(EOS,),
    )


def small_lstm_config(target_prefix: tuple[int, ...] = (3,), **changes: Any) -> TransformerConfig:
    """Return one whose encoder and decoder have recurrent layers only; changes: of the decoder."""
    config = small_config(target_prefix)
    assert config.encoder is not None
    recurrent: dict[str, Any] = {"position": "none", "recurrence": Lstm(width=24)}
    recurrent |= {"recurrent_layers": (0, 1), "layers_without_feed_forward": (0, 1)}
    both = Lstm(width=12, both_ways=changes["cross_attention"] != "none")
    encoder = replace(config.encoder, **recurrent | {"recurrence": both})
    return replace(config, encoder=encoder, **recurrent | changes)


def small_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Return a model whose logits depend on every token, and that ends a text now and then."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


def read(model: Transformer, source_ids: list[int]) -> Source:
    return model.read(torch.tensor([source_ids]), torch.tensor([len(source_ids)]))


@cache
def _logits(model: Transformer, source_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> Floats:
    return next_logits(model, list(target_ids), read(model, list(source_ids)))


class FakeSeq2SeqRunner:
    """`model`, without a cache. encoded: the sources of each run."""

    drafts_exactly = False

    def __init__(
        self, model: Transformer, *, max_num_seqs: int = 4, budget_tokens: int = 1000
    ) -> None:
        assert model.config.encoder is not None
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.max_model_len = model.config.max_model_len
        self.max_source_len = model.config.encoder.max_model_len
        self.decode_seconds = 0.0
        self.kv = SourceRows(
            KVShape(1, 1, 1),
            KVShape(1, 1, 1),
            max_num_seqs=max_num_seqs,
            max_source_len=self.max_source_len,
            max_model_len=self.max_model_len,
            budget_tokens=budget_tokens,
        )
        self.encoded: list[list[int]] = []  # lengths of each step's sources

    def run(self, batch: StepBatch) -> Logits:
        sources = self.kv.sources.array[0, :, 0, :, 0]  # [rows, n_positions]
        targets = self.kv.targets.array[0, :, 0, :, 0]
        logits: list[Floats] = []
        for chunk in batch.decodes:
            sequence, place = chunk.sequence, chunk.start - len(chunk.sequence.prompt_ids)
            token_ids = [sequence.token_ids[place]]
            if sequence.beams is not None and place >= len(sequence.target_prefix):
                token_ids = [text.token_ids[-1] for text in sequence.beams.running]
                for source, target, start in sequence.beams.take_copies():
                    self.kv.copy(sequence.rows[source], sequence.rows[target], start, place)
            for i, (row, token_id) in enumerate(zip(sequence.rows, token_ids, strict=False)):
                targets[row, place] = token_id
                if i < chunk.n_logits:
                    n_source = self.kv.sources.reserved[row]
                    source_ids = tuple(sources[row, :n_source].astype(int).tolist())
                    target_ids = tuple(targets[row, : place + 1].astype(int).tolist())
                    logits.append(_logits(self.model, source_ids, target_ids))
        for chunk in batch.prefills:
            assert chunk.count == len(chunk.sequence.prompt_ids), "a source is never cut"
            sources[chunk.row, : chunk.count] = chunk.sequence.prompt_ids
        self.encoded.append([chunk.count for chunk in batch.prefills])
        for row in self.kv.free_rows:  # as a run writes to all rows in front
            targets[row, 0] = -1
        return Logits.of(np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size))
