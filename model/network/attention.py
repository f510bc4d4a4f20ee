"""Self-attention: over whole sequences in training, over cached keys and values in serving.

softmax(s Q Kᵀ + M) V (Vaswani et al. 2017), s = 1 / √d unless the model says otherwise, with
n_kv_head ≤ n_head key-value heads (Ainslie et al. 2023). `StepInputs` and `PagedInputs` describe a
run over a cache, and how attention is exported for the CPU and for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.network.norm import HeadNorm
from kvasir.model.network.positions import Positions, distances, rotate


class LayerCache(NamedTuple):
    """One layer's keys and values, each in rows [batch, n_kv_head, n_positions, head_dim].

    For CUDA: in blocks [blocks, block size, n_kv_head, head_dim].
    """

    key: Tensor
    value: Tensor


class Attention(nn.Module):
    """The attention sublayer: a projection to queries, keys and values, attention, and one back."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.rotates = config.rotates(layer)
        self.window = config.window_of(layer)
        self.has_own_theta = self.window is not None and bool(config.sliding_window_rope_theta)
        self.widths = [n * config.head_dim for n in (config.n_head, *[config.n_kv_head] * 2)]
        self.qkv = nn.Linear(config.d_model, sum(self.widths), bias=config.qkv_bias)
        if config.qk_norm:
            self.query_norm = HeadNorm(config.n_head, config)
            self.key_norm = HeadNorm(config.n_kv_head, config)
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.attention_sinks else None
        # The exporter for CUDA sets this where each norm has one weight for all heads, as
        # published models do: the operator then normalises heads itself.
        self.norms_in_operator = False
        self.output = nn.Linear(self.widths[0], config.d_model, bias=config.output_bias)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Attend over all of x [batch, sequence, d_model] at positions from 0 on."""
        positions = self._own(positions)
        query, key, value = split_heads(self.project(x, positions), self.config)
        place = torch.arange(x.shape[1], device=x.device)
        if table := positions.rotary:
            query, key = rotate(query, table, place[None]), rotate(key, table, place[None])
        dropout = self.config.attention_dropout if self.training else 0.0
        capped = self.config.attention_softcap is not None
        plain = self.window is None and positions.bias is None and self.sinks is None
        lengths = None if self.config.causal else positions.lengths
        if plain and not capped and lengths is None:
            attended = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=self.config.causal,
                scale=self.config.query_scale,
                enable_gqa=self.config.n_groups > 1,
            )
        else:
            visible = visible_keys(place[None], place, self.window, causal=self.config.causal)
            if lengths is not None:
                within = place < lengths[:, None, None]  # [batch, 1, n_keys]
                # Padding sees itself: the softmax of nothing is NaN, which would spread.
                visible = visible & (within | (place[:, None] == place))
            attended = attend(
                query, key, value, visible, positions.bias, self.config, dropout, self.sinks
            )
        projected: Tensor = self.output(merge_heads(attended))
        return projected

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append x [..., d_model] to `cache` and attend over it."""
        positions = self._own(positions)
        attended, present = inputs.attend(self, self.project(x, positions), positions, cache)
        return self.output(attended), present

    def _own(self, positions: Positions) -> Positions:
        """Return what this layer has to know of positions."""
        if not self.rotates:
            return positions._replace(rotary=None)
        own = positions.rotary_in_windows if self.has_own_theta else positions.rotary
        return positions._replace(rotary=own)

    def project(self, x: Tensor, positions: Positions) -> Tensor:
        """Return queries, keys and values of x: [..., (n_head + 2 n_kv_head) · head_dim]."""
        qkv: Tensor = self.qkv(x)
        scale, norms = positions.query_scale, self.config.qk_norm and not self.norms_in_operator
        if scale is None and not norms:
            return qkv
        query, key, value = qkv.split(self.widths, dim=-1)
        if scale is not None:
            return torch.cat((query * scale[..., None], key, value), dim=-1)
        return torch.cat((self.query_norm(query), self.key_norm(key), value), dim=-1)

    def emit(
        self,
        operator: str,
        qkv: Tensor,
        cache: LayerCache | None,
        inputs: Sequence[Tensor | None],
        **more: Any,
    ) -> tuple[Tensor, LayerCache]:
        """Emit one of ONNX Runtime's attention operators, which aliases past and present.

        cache: None in a run over whole texts. inputs: those after the cache. more: further
        attributes; None leaves one out.
        """
        attributes = {
            "num_heads": self.config.n_head,
            "kv_num_heads": self.config.n_kv_head,
            "do_rotary": int(self.rotates),
            "rotary_interleaved": 0,
            "local_window_size": self.window,
            **more,
            "softcap": self.config.attention_softcap,
        }
        attended = [*qkv.shape[:-1], self.widths[0]]
        past: Sequence[Tensor | None] = cache or (None, None)
        kept = cache or (split_heads(qkv, self.config)[1],) * 2
        output, keys, values = torch.onnx.ops.symbolic_multi_out(
            f"com.microsoft::{operator}",
            inputs=[qkv, None, None, *past, *inputs],
            attrs={name: value for name, value in attributes.items() if value is not None},
            dtypes=(qkv.dtype, kept[0].dtype, kept[1].dtype),
            shapes=(attended, *(list(part.shape) for part in kept)),
            version=1,
        )
        return output, LayerCache(keys, values)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a run over rows, one for each sequence, eagerly or as GroupQueryAttention.

    seqlens_k: int32 [batch], tokens in each row after this run, minus one.
    total_sequence_length: int32 scalar, tokens in the longest row after this run.
    position_ids: int64 [batch, sequence], absolute.
    """

    seqlens_k: Tensor
    total_sequence_length: Tensor
    position_ids: Tensor

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
class PagedInputs:
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
class PackedInputs:
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
RunInputs = CachedInputs | PackedInputs


def split_heads(qkv: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Split [batch, sequence, width] into query, key, value: [batch, heads, sequence, head_dim]."""
    heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim).transpose(1, 2)
    query, key, value = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], dim=1)
    return query, key, value


def merge_heads(x: Tensor) -> Tensor:
    """Merge [batch, heads, sequence, head_dim] into [batch, sequence, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, window: int | None, *, causal: bool = True
) -> Tensor:
    """Return bool [batch, sequence, n_keys]: the keys [n_keys] that queries see."""
    apart = distances(query_positions, key_positions)
    visible = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    return visible if window is None else visible & (apart.abs() < window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    config: TransformerConfig,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention in full, in the shape of query.

    query, key, value: [batch, heads, …, head_dim]. visible: [batch, sequence, n_keys]. bias:
    [batch, n_head, sequence, n_keys], added to scores after they are capped. sinks: [n_head].
    """
    weights = attention_weights(query, key, visible, bias, config, sinks)
    return functional.dropout(weights, dropout) @ value.repeat_interleave(config.n_groups, dim=1)


def attention_weights(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    config: TransformerConfig,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the softmax over visible keys, [batch, n_head, sequence, n_keys]; see `attend`."""
    keys = key.repeat_interleave(config.n_groups, dim=1)
    scores = query @ keys.transpose(-1, -2) * config.query_scale
    if (cap := config.attention_softcap) is not None:
        scores = cap * (scores / cap).tanh()
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    beside = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(dim=-1)[..., :-1]
