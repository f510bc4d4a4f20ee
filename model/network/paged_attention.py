"""Attention of packed tokens over keys and values in blocks: the seam as it is exported for CUDA.

The tokens of all sequences lie one after the other, without padding; a sequence's keys and values are in the blocks
that its row of the block table names, in order (Kwon et al. 2023). So prompts, chunks and decodes run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from model.config import DecoderConfig
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
    """What one run over packed tokens needs besides them; as `model.network.attention.StepInputs` is for rows.

    position_ids: int64 [tokens], absolute. cumulative_sequence_length: int32 [batch + 1], where each sequence's tokens
    begin, and the end. past_seqlens: int32 [batch], tokens in the blocks before this run. block_table: int32 [batch,
    blocks]. slot_mapping: int32 [tokens], block · block size + place in it, of where a token's key and value go; -1 is
    nowhere. attention_metadata: int32 [3], on the CPU: no sequence has more new tokens than the first, none more in all
    than the second, and one has the third at least.
    """

    position_ids: Tensor
    cumulative_sequence_length: Tensor
    past_seqlens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    attention_metadata: Tensor

    def key_positions(self, cache: LayerCache) -> Tensor:
        """Raises ValueError: the operator has no input for biases, which are what positions of keys are for."""
        raise ValueError(f"scores over {list(cache.key.shape)} blocks of keys cannot be biased")

    def attend(
        self, attention: Attention, x: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """x: [tokens, d_model]; cache: [blocks, block size, n_kv_head, head_dim] each.

        Returns [tokens, n_head · head_dim] and the blocks with what is new.
        """
        if torch.onnx.is_in_onnx_export():
            return self._exported(attention, x, positions, cache)
        return self._attend_eagerly(
            attention.project(x), positions, cache, attention.config, attention.window
        )

    def _attend_eagerly(
        self,
        qkv: Tensor,
        positions: Positions,
        cache: LayerCache,
        config: DecoderConfig,
        window: int | None,
    ) -> tuple[Tensor, LayerCache]:
        """The same of queries, keys and values side by side, [tokens, (n_head + 2 n_kv_head) · head_dim]."""
        query, key, value = (
            part[0] for part in split_heads(qkv[None], config)
        )  # [heads, tokens, head_dim]
        if table := positions.rotary:
            places = self.position_ids[None]
            query, key = rotate(query[None], table, places)[0], rotate(key[None], table, places)[0]
        keys, values = self._written(cache.key, key), self._written(cache.value, value)
        ends = self.cumulative_sequence_length.tolist()
        attended = []
        for row, (start, end) in enumerate(pairwise(ends)):
            past = int(self.past_seqlens[row])
            place = torch.arange(past + end - start)
            key_rows, value_rows = (
                self._read(blocks, row, place)[None] for blocks in (keys, values)
            )
            visible = visible_keys(place[None, past:], place, window)
            heads = attend(query[None, :, start:end], key_rows, value_rows, visible, None, config)
            attended.append(merge_heads(heads)[0])
        return torch.cat(attended), LayerCache(keys, values)

    def _written(self, blocks: Tensor, new: Tensor) -> Tensor:
        """A copy of the blocks with new [n_kv_head, tokens, head_dim] at their slots."""
        slots = blocks.flatten(0, 1).clone()
        stored = self.slot_mapping >= 0
        slots[self.slot_mapping[stored].long()] = new.transpose(0, 1)[stored]
        return slots.view_as(blocks)

    def _read(self, blocks: Tensor, row: int, place: Tensor) -> Tensor:
        """[n_kv_head, n_places, head_dim] of a sequence."""
        size = blocks.shape[1]
        slots = self.block_table[row].long()[place // size] * size + place % size
        return blocks.flatten(0, 1)[slots].transpose(0, 1)

    def _exported(
        self, attention: Attention, x: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """ONNX Runtime's com.microsoft.PagedAttention: packed q, k, v; rotary inside; the blocks aliased.

        The operator normalises heads itself where all heads of a layer share a weight. In blocks of 8 bits a step is
        worth 1: the exporter has put scales into the weights around them.
        """
        config, table = attention.config, positions.rotary
        qkv = attention.qkv(x) if attention.shares_head_norms else attention.project(x)
        norms: list[Tensor | None] = [None, None]
        if attention.shares_head_norms:
            norms = [attention.query_norm.weight[0], attention.key_norm.weight[0]]
        attributes: dict[str, Any] = {
            "num_heads": config.n_head,
            "kv_num_heads": config.n_kv_head,
            "scale": config.query_scale,
            "do_rotary": int(table is not None),
            "rotary_interleaved": 0,
        }
        scales: list[Tensor | None] = [None, None]
        if cache.key.element_size() == 1:
            scales = [torch.ones(1), torch.ones(1)]
            attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        if attention.shares_head_norms:
            attributes["qk_norm_epsilon"] = config.norm_eps
        if attention.window is not None:
            attributes["local_window_size"] = attention.window
        if config.attention_softcap is not None:
            attributes["softcap"] = config.attention_softcap
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
            attrs=attributes,
            dtypes=(qkv.dtype, cache.key.dtype, cache.value.dtype),
            shapes=(
                [qkv.shape[0], config.n_head * config.head_dim],
                list(cache.key.shape),
                list(cache.value.shape),
            ),
            version=1,
        )
        return output, LayerCache(keys, values)
