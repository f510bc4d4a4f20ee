"""Causal self-attention: over a whole sequence in training, over rows of cached keys and values in serving.

softmax(Q Kᵀ / √d + M) V (Vaswani et al. 2017), with n_kv_head ≤ n_head key-value heads (Ainslie et al. 2023) and rotary
positions (Su et al. 2021). `cached_attention` is the one seam that exports differently per device: its eager branch
computes exactly what the operator it exports to does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one run over cached rows needs besides the tokens.

    seqlens_k: int32 [batch], tokens in each row after this run, minus one.
    total_sequence_length: int32 scalar, the largest of them (plus one).
    position_ids: int64 [batch, sequence], absolute.
    """

    seqlens_k: Tensor
    total_sequence_length: Tensor
    position_ids: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's rows, each [batch, n_kv_head, n_positions, head_dim]."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of position · frequency, each [n_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_table(config: DecoderConfig) -> RotaryTable:
    """Angles p · θ^(-2i/d) for every position p and pair i (Su et al. 2021, section 3.2.2)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), config.rope_theta**-pairs)
    return RotaryTable(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, table: RotaryTable, position_ids: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of heads x [batch, heads, sequence, head_dim] by their positions [batch, sequence]."""
    cos = table.cos[position_ids][:, None]  # [batch, 1, sequence, head_dim / 2]
    sin = table.sin[position_ids][:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """The attention sublayer: one projection to queries, keys and values, attention, one projection back."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        n_projected = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.qkv = nn.Linear(config.d_model, n_projected, bias=config.qkv_bias)
        self.output = nn.Linear(config.n_head * config.head_dim, config.d_model, bias=config.output_bias)

    def forward(self, x: Tensor, table: RotaryTable | None) -> Tensor:
        """Attend over the whole of x [batch, sequence, d_model] at positions 0, 1, …, each blind to what follows it."""
        query, key, value = split_heads(self.qkv(x), self.config)
        if table is not None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
            query, key = rotate(query, table, position_ids), rotate(key, table, position_ids)
        dropout = self.config.attention_dropout if self.training else 0.0
        grouped = self.config.n_groups > 1
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
        projected: Tensor = self.output(merge_heads(attended))
        return projected

    def step(
        self, x: Tensor, table: RotaryTable | None, inputs: StepInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append x [batch, sequence, d_model] to the rows of `cache` and attend over them."""
        attended, present = cached_attention(self.qkv(x), table, inputs, cache, self.config)
        return self.output(attended), present


def split_heads(qkv: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, sequence, (n_head + 2 n_kv_head) · head_dim] → query, key, value [batch, heads, sequence, head_dim]."""
    heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim).transpose(1, 2)
    query, key, value = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=1)
    return query, key, value


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, sequence, head_dim] → [batch, sequence, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)


def cached_attention(
    qkv: Tensor, table: RotaryTable | None, inputs: StepInputs, cache: LayerCache, config: DecoderConfig
) -> tuple[Tensor, LayerCache]:
    """Attention of new tokens over cached rows, to which they are appended.

    qkv: [batch, sequence, (n_head + 2 n_kv_head) · head_dim]. Row b's new tokens start at seqlens_k[b] + 1 - sequence,
    or at 0 in a first prompt that is padded on the right. Returns [batch, sequence, n_head · head_dim] and the rows.
    """
    if torch.onnx.is_in_onnx_export():
        return _group_query_attention(qkv, table, inputs, cache, config)
    query, key, value = split_heads(qkv, config)
    if table is not None:
        query, key = rotate(query, table, inputs.position_ids), rotate(key, table, inputs.position_ids)
    sequence = query.shape[2]
    starts = (inputs.seqlens_k.long() + 1 - sequence).clamp(min=0)
    positions = starts[:, None] + torch.arange(sequence)  # [batch, sequence]
    present = LayerCache(_append(cache.key, key, positions), _append(cache.value, value, positions))
    visible = torch.arange(cache.key.shape[2]) <= positions[..., None]  # [batch, sequence, n_positions]
    keys = present.key.repeat_interleave(config.n_groups, dim=1)
    values = present.value.repeat_interleave(config.n_groups, dim=1)
    scores = query @ keys.transpose(-1, -2) / math.sqrt(config.head_dim)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
    return merge_heads(weights @ values), present


def _append(rows: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """rows [batch, heads, n_positions, head_dim] with `new` written at `positions` [batch, sequence]; a copy."""
    index = positions[:, None, :, None].expand_as(new)
    return rows.scatter(2, index, new)


def _group_query_attention(
    qkv: Tensor, table: RotaryTable | None, inputs: StepInputs, cache: LayerCache, config: DecoderConfig
) -> tuple[Tensor, LayerCache]:
    """ONNX Runtime's com.microsoft.GroupQueryAttention: packed q, k, v; rotary inside; past and present aliased."""
    attended = [*qkv.shape[:2], config.n_head * config.head_dim]
    rotary = [table.cos, table.sin] if table else [None, None]
    output, key, value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs=[
            qkv,
            None,
            None,
            cache.key,
            cache.value,
            inputs.seqlens_k,
            inputs.total_sequence_length,
            *rotary,
            inputs.position_ids if table else None,
        ],
        attrs={
            "num_heads": config.n_head,
            "kv_num_heads": config.n_kv_head,
            "scale": 1.0,  # the exporter has 1 / sqrt(head_dim) in the queries' weights
            "do_rotary": int(table is not None),
            "rotary_interleaved": 0,
        },
        dtypes=(qkv.dtype, cache.key.dtype, cache.value.dtype),
        shapes=(attended, list(cache.key.shape), list(cache.value.shape)),
        version=1,
    )
    return output, LayerCache(key, value)
