"""Causal self-attention: over a whole sequence in training, over rows of cached keys and values in serving.

softmax(s Q Kᵀ + M) V (Vaswani et al. 2017), s = 1 / √d unless the model says otherwise, with n_kv_head ≤ n_head
key-value heads (Ainslie et al. 2023). What a run
over cached keys and values is given (`RunInputs`) is the one seam that exports differently per device: each kind of it
computes eagerly exactly what the operator that it exports to does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import DecoderConfig
from model.network.norm import HeadNorm
from model.network.positions import Positions, RotaryTable, rotate


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: rows [batch, n_kv_head, n_positions, head_dim], or blocks of them."""

    key: Tensor
    value: Tensor


class RunInputs(Protocol):
    """What one run over cached keys and values needs besides the tokens, and how attention is computed over them."""

    @property
    def position_ids(self) -> Tensor:
        """int64, shaped as the tokens; absolute."""
        ...

    def key_positions(self, cache: LayerCache) -> Tensor:
        """int64 [n_keys]: the positions that a token may attend to."""
        ...

    def attend(
        self, attention: Attention, x: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """What new tokens x [..., d_model] gather from a cache, to which they are added: [..., n_head · head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A run over rows, one for each sequence.

    seqlens_k: int32 [batch], tokens in each row after this run, minus one.
    total_sequence_length: int32 scalar, the largest of them (plus one).
    position_ids: int64 [batch, sequence], absolute.
    """

    seqlens_k: Tensor
    total_sequence_length: Tensor
    position_ids: Tensor

    def key_positions(self, cache: LayerCache) -> Tensor:
        """0, 1, … of all that a row has room for, or, exported, of what is in use."""
        if not torch.onnx.is_in_onnx_export():
            return torch.arange(cache.key.shape[2])
        limits = [torch.tensor(0), self.total_sequence_length.long(), torch.tensor(1)]
        return torch.onnx.ops.symbolic(
            "Range", limits, dtype=torch.int64, shape=[cache.key.shape[2]]
        )

    def attend(
        self, attention: Attention, x: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        return cached_attention(
            attention.project(x), positions, self, cache, attention.config, attention.window
        )


class Attention(nn.Module):
    """The attention sublayer: one projection to queries, keys and values, attention, one projection back."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.rotates = config.rotates(layer)
        self.window = config.window_of(layer)
        self.widths = [
            n * config.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)
        ]
        self.qkv = nn.Linear(config.d_model, sum(self.widths), bias=config.qkv_bias)
        if config.qk_norm:
            self.query_norm = HeadNorm(config.n_head, config.head_dim, config.norm_eps)
            self.key_norm = HeadNorm(config.n_kv_head, config.head_dim, config.norm_eps)
        self.shares_head_norms = (
            False  # the exporter notes here that all heads have one weight, as published ones do
        )
        self.output = nn.Linear(self.widths[0], config.d_model, bias=config.output_bias)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Attend over the whole of x [batch, sequence, d_model] at positions 0, 1, …, each blind to what follows it."""
        query, key, value = split_heads(self.project(x), self.config)
        place = torch.arange(x.shape[1], device=x.device)
        if table := self._rotary(positions):
            query, key = rotate(query, table, place[None]), rotate(key, table, place[None])
        dropout = self.config.attention_dropout if self.training else 0.0
        plain = (
            self.window is None and positions.bias is None and self.config.attention_softcap is None
        )
        if plain:
            attended = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=self.config.query_scale,
                enable_gqa=self.config.n_groups > 1,
            )
        else:
            visible = visible_keys(place[None], place, self.window)
            attended = attend(query, key, value, visible, positions.bias, self.config, dropout)
        projected: Tensor = self.output(merge_heads(attended))
        return projected

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append x [..., d_model] to `cache` and attend over it."""
        known = Positions(self._rotary(positions), positions.bias)
        attended, present = inputs.attend(self, x, known, cache)
        return self.output(attended), present

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of x, side by side: [..., (n_head + 2 n_kv_head) · head_dim]."""
        qkv: Tensor = self.qkv(x)
        if not self.config.qk_norm:
            return qkv
        query, key, value = qkv.split(self.widths, dim=-1)
        return torch.cat((self.query_norm(query), self.key_norm(key), value), dim=-1)

    def _rotary(self, positions: Positions) -> RotaryTable | None:
        return positions.rotary if self.rotates else None


def split_heads(qkv: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, sequence, (n_head + 2 n_kv_head) · head_dim] → query, key, value [batch, heads, sequence, head_dim]."""
    heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim).transpose(1, 2)
    query, key, value = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=1)
    return query, key, value


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, sequence, head_dim] → [batch, sequence, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)


def visible_keys(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: bool [batch, sequence, n_keys], of positions [batch, sequence] and [n_keys]."""
    distances = query_positions[..., None] - key_positions
    visible = distances >= 0
    return visible if window is None else visible & (distances < window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    config: DecoderConfig,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in full: heads [batch, heads, …, head_dim], visible [batch, sequence, n_keys].

    bias: [batch, n_head, sequence, n_keys], added to scores after they are capped. Returns what queries look like.
    """
    weights = attention_weights(query, key, visible, bias, config)
    return functional.dropout(weights, dropout) @ value.repeat_interleave(config.n_groups, dim=1)


def attention_weights(
    query: Tensor, key: Tensor, visible: Tensor, bias: Tensor | None, config: DecoderConfig
) -> Tensor:
    """softmax over the visible keys: [batch, n_head, sequence, n_keys]; arguments as of `attend`."""
    scores = (
        query @ key.repeat_interleave(config.n_groups, dim=1).transpose(-1, -2) * config.query_scale
    )
    if config.attention_softcap is not None:
        scores = config.attention_softcap * (scores / config.attention_softcap).tanh()
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)


def cached_attention(
    qkv: Tensor,
    positions: Positions,
    inputs: StepInputs,
    cache: LayerCache,
    config: DecoderConfig,
    window: int | None = None,
) -> tuple[Tensor, LayerCache]:
    """Attention of new tokens over cached rows, to which they are appended.

    qkv: [batch, sequence, (n_head + 2 n_kv_head) · head_dim]. Row b's new tokens start at seqlens_k[b] + 1 - sequence,
    or at 0 in a first prompt that is padded on the right. Returns [batch, sequence, n_head · head_dim] and the rows.
    """
    if torch.onnx.is_in_onnx_export():
        return _group_query_attention(qkv, positions, inputs, cache, config, window)
    query, key, value = split_heads(qkv, config)
    if table := positions.rotary:
        query, key = (
            rotate(query, table, inputs.position_ids),
            rotate(key, table, inputs.position_ids),
        )
    sequence = query.shape[2]
    starts = (inputs.seqlens_k.long() + 1 - sequence).clamp(min=0)
    places = starts[:, None] + torch.arange(sequence)  # [batch, sequence]
    present = LayerCache(_append(cache.key, key, places), _append(cache.value, value, places))
    visible = visible_keys(places, torch.arange(cache.key.shape[2]), window)
    return merge_heads(
        attend(query, present.key, present.value, visible, positions.bias, config)
    ), present


def _append(rows: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """rows [batch, heads, n_positions, head_dim] with `new` written at `positions` [batch, sequence]; a copy."""
    index = positions[:, None, :, None].expand_as(new)
    return rows.scatter(2, index, new)


def _group_query_attention(
    qkv: Tensor,
    positions: Positions,
    inputs: StepInputs,
    cache: LayerCache,
    config: DecoderConfig,
    window: int | None,
) -> tuple[Tensor, LayerCache]:
    """ONNX Runtime's com.microsoft.GroupQueryAttention: packed q, k, v; rotary inside; past and present aliased."""
    table = positions.rotary
    attended = [*qkv.shape[:2], config.n_head * config.head_dim]
    attributes: dict[str, Any] = {
        "num_heads": config.n_head,
        "kv_num_heads": config.n_kv_head,
        "scale": 1.0,  # the exporter has the scale in what makes queries
        "do_rotary": int(table is not None),
        "rotary_interleaved": 0,
    }
    if window is not None:
        attributes["local_window_size"] = window
    if config.attention_softcap is not None:
        attributes["softcap"] = config.attention_softcap
    output, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs=[
            qkv,
            None,
            None,
            cache.key,
            cache.value,
            inputs.seqlens_k,
            inputs.total_sequence_length,
            table.cos if table else None,
            table.sin if table else None,
            inputs.position_ids if table else None,
            positions.bias,
        ],
        attrs=attributes,
        dtypes=(qkv.dtype, cache.key.dtype, cache.value.dtype),
        shapes=(attended, list(cache.key.shape), list(cache.value.shape)),
        version=1,
    )
    return output, LayerCache(keys, values)
