"""Attention of packed tokens over keys and values in blocks, as it is exported for CUDA.

The tokens of all sequences lie one after the other, without padding; a sequence's keys and values
are in the blocks that its row of the block table names, in order (Kwon et al. 2023). So prompts,
chunks and decodes run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.network.attention import Attention, LayerCache
from model.network.positions import Positions


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The inputs of a run over packed tokens, for export only.

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
        """Emit PagedAttention, which appends new tokens to their blocks and attends over these.

        qkv: [tokens, (n_head + 2 n_kv_head) · head_dim]. In blocks of 8 bits a step is worth 1: the
        exporter has put scales into the weights around.
        """
        assert torch.onnx.is_in_onnx_export(), "attention over blocks is for export only"
        config, table = attention.config, positions.rotary
        more: dict[str, Any] = {"rotates": table is not None, "scale": config.query_scale}
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
            table.cos if table else None,
            table.sin if table else None,
            self.slot_mapping,
            None,  # head_sink
            *norms,
            *scales,
            self.attention_metadata,
        ]
        return attention.emit("PagedAttention", qkv, cache, inputs, **more)
