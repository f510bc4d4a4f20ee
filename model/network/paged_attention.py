"""Attention of packed tokens over keys and values in blocks, as it is exported for CUDA.

The tokens of all sequences lie one after the other, without padding; a sequence's keys and values
are in the blocks that its row of the block table names, in order (Kwon et al. 2023). So prompts,
chunks and decodes run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from model.network.attention import (
    Attention,
    LayerCache,
    attend,
    merge_heads,
    split_heads,
    visible_keys,
)
from model.network.positions import Positions, rotate


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The inputs of a run over packed tokens, as `model.network.attention.StepInputs` over rows.

    position_ids: int64 [tokens], absolute. cumulative_sequence_length: int32 [batch + 1], the start
    of each sequence's tokens, and the end. past_seqlens: int32 [batch], tokens in the blocks before
    this run. block_table: int32 [batch, blocks]. slot_mapping: int32 [tokens], block · block size +
    place in it, to which a token's key and value go; -1 is nowhere. attention_metadata: int32 [3],
    on the CPU: upper bounds on a sequence's new tokens and on its tokens in all, and a lower bound
    on the tokens in all of the longest.
    """

    position_ids: Tensor
    cumulative_sequence_length: Tensor
    past_seqlens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    attention_metadata: Tensor

    def key_positions(self, cache: LayerCache) -> Tensor:
        """Raise ValueError: these positions are for biases, which the operator cannot add."""
        raise ValueError(f"scores over {list(cache.key.shape)} blocks of keys cannot be biased")

    def attend(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append new tokens to their blocks and attend over these.

        qkv: [tokens, (n_head + 2 n_kv_head) · head_dim]. cache: [blocks, block size, n_kv_head,
        head_dim] each. Returns [tokens, n_head · head_dim] and the blocks with what is new.
        """
        if torch.onnx.is_in_onnx_export():
            return self._paged_attention(attention, qkv, positions, cache)
        config = attention.config
        query, key, value = split_heads(qkv[None], config)  # [1, heads, tokens, head_dim]
        if table := positions.rotary:
            places = self.position_ids[None]
            query, key = rotate(query, table, places), rotate(key, table, places)
        keys, values = self._written(cache.key, key[0]), self._written(cache.value, value[0])
        attended = []
        for row, (start, end) in enumerate(pairwise(self.cumulative_sequence_length.tolist())):
            past = int(self.past_seqlens[row])
            place = torch.arange(past + end - start)
            key_rows, value_rows = (self._read(of, row, place)[None] for of in (keys, values))
            visible = visible_keys(place[None, past:], place, attention.window)
            heads = attend(query[:, :, start:end], key_rows, value_rows, visible, None, config)
            attended.append(merge_heads(heads)[0])
        return torch.cat(attended), LayerCache(keys, values)

    def _written(self, blocks: Tensor, new: Tensor) -> Tensor:
        """Return a copy of the blocks with new [n_kv_head, tokens, head_dim] at their slots."""
        slots = blocks.flatten(0, 1).clone()
        stored = self.slot_mapping >= 0
        slots[self.slot_mapping[stored].long()] = new.transpose(0, 1)[stored]
        return slots.view_as(blocks)

    def _read(self, blocks: Tensor, row: int, place: Tensor) -> Tensor:
        """Return a sequence's keys or values at `place`: [n_kv_head, n_places, head_dim]."""
        size = blocks.shape[1]
        slots = self.block_table[row].long()[place // size] * size + place % size
        return blocks.flatten(0, 1)[slots].transpose(0, 1)

    def _paged_attention(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Emit com.microsoft.PagedAttention, which rotates, and aliases past and present.

        In blocks of 8 bits a step is worth 1: the exporter has put scales into the weights around.
        """
        config, table = attention.config, positions.rotary
        more: dict[str, Any] = {}
        scales: list[Tensor | None] = [None, None]
        if cache.key.element_size() == 1:
            scales = [torch.ones(1), torch.ones(1)]
            more |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        norms: list[Tensor | None] = [None, None]
        if attention.norms_in_operator:
            norms = [attention.query_norm.weight[0], attention.key_norm.weight[0]]
            more["qk_norm_epsilon"] = config.norm_eps
        output, keys, values = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::PagedAttention",
            inputs=[
                qkv,
                None,
                None,
                cache.key,
                cache.value,
                self.cumulative_sequence_length,
                self.past_seqlens,
                self.block_table,
                table.cos if table else None,
                table.sin if table else None,
                self.slot_mapping,
                None,  # head_sink
                *norms,
                *scales,
                self.attention_metadata,
            ],
            attrs=attention.operator_attributes(positions, config.query_scale, **more),
            dtypes=(qkv.dtype, cache.key.dtype, cache.value.dtype),
            shapes=(
                [qkv.shape[0], attention.widths[0]],
                list(cache.key.shape),
                list(cache.value.shape),
            ),
            version=1,
        )
        return output, LayerCache(keys, values)
