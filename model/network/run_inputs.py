"""The inputs of a run: over rows or blocks of cached keys and values, or over whole texts.

Each emits attention for the graph that it is exported to, or computes the same eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvasir.model.network.attention import (
    Attention,
    LayerCache,
    RunInputs,
    attend,
    merge_heads,
    split_heads,
    visible_keys,
)
from kvasir.model.network.positions import Positions, rotate


@dataclass(frozen=True, slots=True)
class StepInputs(RunInputs):
    """The inputs of a run over rows, one for each sequence, eagerly or as GroupQueryAttention.

    seqlens_k: int32 [batch], tokens in each row after this run, minus one.
    total_sequence_length: int32 scalar, tokens in the longest row after this run.
    position_ids: int64 [batch, sequence], absolute. n_new: int64 [batch], the tokens of each row
    that move its state, in a decoder with recurrent layers.
    """

    seqlens_k: Tensor
    total_sequence_length: Tensor
    position_ids: Tensor
    n_new: Tensor | None = None

    def key_positions(self, cache: LayerCache) -> Tensor:
        """Return 0, 1, … of all that a row has room for or, exported, of what is in use."""
        if not torch.onnx.is_in_onnx_export():
            return torch.arange(cache.key.shape[2])
        limits = [torch.tensor(0), self.total_sequence_length.long(), torch.tensor(1)]
        shape = [cache.key.shape[2]]
        return torch.onnx.ops.symbolic("Range", limits, dtype=torch.int64, shape=shape)

    def attend(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append new tokens to their rows and attend over these.

        qkv: [batch, sequence, (n_head + 2 n_kv_head) · head_dim]. Row b's new tokens start at
        seqlens_k[b] + 1 - sequence, or at 0 in a first prompt that is padded on the right. Returns
        [batch, sequence, n_head · head_dim] and the rows.
        """
        config, table = attention.config, positions.rotary
        if torch.onnx.is_in_onnx_export():
            rotary = (*table, self.position_ids) if table else (None, None, None)
            inputs = [self.seqlens_k, self.total_sequence_length, *rotary, positions.bias]
            if attention.sinks is not None:
                inputs.append(attention.sinks)
            # The exporter puts attention's scale into the weights that make queries.
            return attention.emit("GroupQueryAttention", qkv, cache, inputs, scale=1.0)
        query, key, value = split_heads(qkv, config)
        if table:
            query, key = (rotate(heads, table, self.position_ids) for heads in (query, key))
        sequence = query.shape[2]
        starts = (self.seqlens_k.long() + 1 - sequence).clamp(min=0)
        places = starts[:, None] + torch.arange(sequence)  # [batch, sequence]
        index = places[:, None, :, None].expand_as(key)
        present = LayerCache(cache.key.scatter(2, index, key), cache.value.scatter(2, index, value))
        visible = visible_keys(places, self.key_positions(cache), attention.window)
        attended = attend(query, *present, visible, positions.bias, config, sinks=attention.sinks)
        return merge_heads(attended), present


@dataclass(frozen=True, slots=True)
class PagedInputs(RunInputs):
    """The inputs of a run over packed tokens and blocks of keys and values, for export to CUDA.

    Tokens of all sequences lie one after the other, without padding, so prompts, chunks and decodes
    run together. position_ids: int64 [tokens], absolute. cumulative_sequence_length: int32 [batch +
    1], the start of each sequence's tokens, and the end. past_seqlens: int32 [batch], tokens in the
    blocks before this run. block_table: int32 [batch, blocks], each sequence's blocks in order
    (Kwon et al. 2023). slot_mapping: int32 [tokens], block · block size + place in it, to which a
    token's key and value go; None: it follows from the rest. attention_metadata: int32 [3], on the
    CPU: upper bounds on a sequence's new tokens and on its tokens in all, and a lower bound on the
    tokens in all of the longest.
    """

    position_ids: Tensor
    cumulative_sequence_length: Tensor
    past_seqlens: Tensor
    block_table: Tensor
    attention_metadata: Tensor
    slot_mapping: Tensor | None = None

    def key_positions(self, cache: LayerCache) -> Tensor:
        """Raise ValueError: these positions are for biases, which the operator cannot add."""
        raise ValueError(f"scores over {list(cache.key.shape)} blocks of keys cannot be biased")

    def attend(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Emit PagedAttention, which appends new tokens to their blocks and attends over these.

        qkv: [tokens, (n_head + 2 n_kv_head) · head_dim]. In blocks of 8 bits a step is worth 1: the
        exporter has put scales into the weights around.
        """
        assert torch.onnx.is_in_onnx_export(), "attention over blocks is for export only"
        config, table = attention.config, positions.rotary
        more: dict[str, Any] = {"scale": config.query_scale}
        scales: list[Tensor | None] = [None, None]
        if cache.key.element_size() == 1:
            scales = [torch.ones(1), torch.ones(1)]
            more |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        norms: list[Tensor | None] = [None, None]
        if attention.norms_in_operator:
            norms = [attention.query_norm.weight[0], attention.key_norm.weight[0]]
            more["qk_norm_epsilon"] = config.norm_eps
        inputs = [
            self.cumulative_sequence_length,
            self.past_seqlens,
            self.block_table,
            *(table or (None, None)),
            self.slot_mapping,
            None,  # head_sink
            *norms,
            *scales,
            self.attention_metadata,
        ]
        return attention.emit("PagedAttention", qkv, cache, inputs, **more)


@dataclass(frozen=True, slots=True)
class PackedInputs(RunInputs):
    """The inputs of a run over whole texts without a cache, for export to the CPU.

    Tokens of all texts lie one after the other, without padding; attention alone sees rows.
    position_ids: int64 [tokens], of each token in its text. rows: int64 [texts, sequence], the
    token at each position of a text, any one after its last. lengths: int64 [texts]. places: int64
    [tokens], text · sequence + position of each token.
    """

    position_ids: Tensor
    rows: Tensor
    lengths: Tensor
    places: Tensor

    def attend(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Emit GroupQueryAttention over rows.

        qkv: [tokens, (n_head + 2 n_kv_head) · head_dim]. Returns [tokens, n_head · head_dim], and
        `cache` as it is.
        """
        assert torch.onnx.is_in_onnx_export(), "attention over packed texts is for export only"
        config, bias, window = attention.config, positions.bias, attention.window
        more: dict[str, Any] = {"scale": config.query_scale, "causal": int(config.causal)}
        if window is not None and not config.causal:  # the operator's windows look back only
            place = torch.arange(self.rows.shape[1])
            visible = visible_keys(place[None], place, window, causal=False)
            mask = torch.zeros(()).where(visible[:, None], -torch.inf)
            bias = mask if bias is None else bias + mask
            more["local_window_size"] = None
        table = positions.rotary or (None, None)
        seqlens_k = (self.lengths - 1).to(torch.int32)
        longest = torch.tensor(self.rows.shape[1], dtype=torch.int32)
        inputs = [seqlens_k, longest, *table, None, bias]
        if attention.sinks is not None:
            inputs.append(attention.sinks)
        in_rows = functional.embedding(self.rows, qkv)  # [texts, sequence, width]
        attended, _ = attention.emit("GroupQueryAttention", in_rows, None, inputs, **more)
        return functional.embedding(self.places, attended.flatten(0, 1)), cache


CachedInputs = StepInputs | PagedInputs
