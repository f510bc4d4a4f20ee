"""Self-attention: over whole sequences in training, over cached keys and values in serving.

softmax(s Q Kᵀ + M) V (Vaswani et al. 2017), s = 1 / √d unless the model says otherwise, with
n_kv_head ≤ n_head key-value heads (Ainslie et al. 2023). `run_inputs.py` has the runs
over a cache, and how attention is exported for the CPU and for CUDA.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.network.gradients import attend_causally
from kvasir.model.network.norm import Clip, HeadNorm
from kvasir.model.network.positions import Positions, RotaryTable, distances, rotate, turn

_MOST_SCORES = 2**26  # of all rows and heads: a quarter of them takes 64 MiB while it exists


class LayerCache(NamedTuple):
    """One layer's keys and values, each in rows [batch, n_kv_head, n_positions, head_dim].

    For CUDA: in blocks [blocks, block size, n_kv_head, head_dim].
    """

    key: Tensor
    value: Tensor


class RunInputs(ABC):
    """The inputs of a run, which know where keys and values are: see `run_inputs.py`."""

    @abstractmethod
    def attend(
        self, attention: Attention, qkv: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append the new tokens of qkv [..., width] to a cache, and attend over it."""


class Attention(nn.Module):
    """The attention sublayer: a projection to queries, keys and values, attention, and one back."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.turns = config.rotates(layer) and config.turns_outside
        self.rotates = config.rotates(layer) and not self.turns
        self.norms_heads = config.norms_heads(layer)
        self.window = config.window_of(layer)
        self.has_own_theta = self.window is not None and bool(config.sliding_window_rope_theta)
        self.widths = [n * config.head_dim for n in (config.n_head, *[config.n_kv_head] * 2)]
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.attention_sinks else None
        # The exporter for CUDA sets this where each norm has one weight for all heads, as
        # published models do: the operator then normalises heads itself.
        self.norms_in_operator = False
        self.add_projections(config)

    def add_projections(self, config: TransformerConfig) -> None:
        """Make the modules before and after attention."""
        self.qkv = nn.Linear(config.d_model, sum(self.widths), bias=config.qkv_bias)
        if self.norms_heads:
            self.query_norm = HeadNorm(config.n_head, config)
            self.key_norm = HeadNorm(config.n_kv_head, config)
        if config.attention_gate:
            n_gates = config.n_head if config.attention_gate_by_head else self.widths[0]
            self.gate = nn.Linear(config.d_model, n_gates, bias=config.qkv_bias)
        clip = config.qkv_clip
        self.clip = nn.Identity() if clip is None else Clip(clip, sum(self.widths))
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
        plain = plain and not capped and lengths is None
        if plain and self._is_in_blocks(x, dropout):
            key, value = (
                part.repeat_interleave(self.config.n_groups, dim=1) for part in (key, value)
            )
            attended = attend_causally(query, key, value, self.config.query_scale)
        elif plain:
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
        return self.lower(self._gated(merge_heads(attended), x))

    def _is_in_blocks(self, x: Tensor, dropout: float) -> bool:
        """Tell whether x is trained on a CPU in compiled blocks, faster than by one operator."""
        is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        n_scores = x.shape[0] * self.config.n_head * x.shape[1] ** 2
        fits = self.config.causal and not dropout and n_scores <= _MOST_SCORES
        return is_compiled and fits and x.device.type == "cpu"

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Append x [..., d_model] to `cache` and attend over it."""
        positions = self._own(positions)
        attended, present = inputs.attend(self, self.project(x, positions), positions, cache)
        return self.lower(self._gated(attended, x)), present

    def _gated(self, attended: Tensor, x: Tensor) -> Tensor:
        if not self.config.attention_gate:
            return attended
        gates: Tensor = self.gate(x).sigmoid()
        if not self.config.attention_gate_by_head:
            return attended * gates
        heads: Tensor = attended.unflatten(-1, (self.config.n_head, -1)) * gates[..., None]
        return heads.flatten(-2)

    def _own(self, positions: Positions) -> Positions:
        """Return what this layer has to know of positions."""
        if not self.rotates:
            return positions._replace(rotary=None)
        own = positions.rotary_in_windows if self.has_own_theta else positions.rotary
        return positions._replace(rotary=own)

    def project(self, x: Tensor, positions: Positions) -> Tensor:
        """Return queries, keys and values of x: [..., (n_head + 2 n_kv_head) · head_dim]."""
        qkv: Tensor = self.qkv(x)
        if (scale := positions.query_scale) is not None:
            query, *others = qkv.split(self.widths, dim=-1)
            return torch.cat((query * scale[..., None], *others), dim=-1)
        if self.norms_heads and not self.norms_in_operator:
            query, key, value = qkv.split(self.widths, dim=-1)
            if self.turns and (angles := positions.of_tokens):
                query, key = (self._turn(heads, angles) for heads in (query, key))
            qkv = torch.cat((self.query_norm(query), self.key_norm(key), value), dim=-1)
        clipped: Tensor = self.clip(qkv)
        return clipped

    def lower(self, attended: Tensor) -> Tensor:
        """Return the sublayer's output of what is attended, [..., n_head · head_dim]."""
        lowered: Tensor = self.output(attended)
        return lowered

    def _turn(self, x: Tensor, angles: RotaryTable) -> Tensor:
        of_heads = RotaryTable(*(part[..., None, :] for part in angles))
        return turn(x.unflatten(-1, (-1, self.config.head_dim)), of_heads).flatten(-2)

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
