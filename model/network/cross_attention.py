"""Cross-attention: a target's tokens attend to the vectors of its source (Vaswani et al. 2017)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import LayerCache, merge_heads


class Source(NamedTuple):
    """Encoded sources: vectors [batch, n_source, d_model], and the tokens of each row, [batch].

    Rows are padded after them.
    """

    hidden: Tensor
    lengths: Tensor

    def attend(self, attention: CrossAttention, query: Tensor) -> Tensor:
        """Attend from queries [batch, sequence, n_head · head_dim], in the shape of these."""
        config, place = attention.config, torch.arange(self.hidden.shape[1], device=query.device)
        if attention.score is not None:
            keys_values = attention.keys_and_values(self.hidden)
            inside = place < self.lengths[:, None]
            return attend_additively(query, *keys_values, inside, attention.score)
        attended = functional.scaled_dot_product_attention(
            query.unflatten(-1, (-1, config.head_dim)).transpose(1, 2),
            *attention.keys_and_values(self.hidden),
            attn_mask=(place < self.lengths[:, None])[:, None, None],
            dropout_p=config.attention_dropout if attention.training else 0.0,
            scale=config.query_scale,
            enable_gqa=config.n_groups > 1,
        )
        return merge_heads(attended)


class SourceRows(NamedTuple):
    """One layer's keys and values of sources, for export to the CPU.

    keys, values: [batch, n_kv_head, n_source_positions, head_dim]. seqlens_k: int32 [batch], tokens
    in each row, minus one. total_length: int32 scalar, tokens in the longest row.
    """

    keys: Tensor
    values: Tensor
    seqlens_k: Tensor
    total_length: Tensor

    def attend(self, attention: CrossAttention, query: Tensor) -> Tensor:
        """Emit GroupQueryAttention without new keys; see `Source.attend`.

        With several queries a row, the operator takes one row only, of no fewer keys.
        """
        assert torch.onnx.is_in_onnx_export(), "attention over sources' rows is for export only"
        config = attention.config
        if attention.score is not None:
            end, emit = self.total_length.long(), torch.onnx.ops.symbolic
            ends, shape = [torch.tensor([0]), end.reshape(1), torch.tensor([2])], self.keys.shape
            keys, values = (
                emit("Slice", [rows, *ends], dtype=rows.dtype, shape=shape)
                for rows in (self.keys, self.values)
            )
            limits = [torch.tensor(0), end, torch.tensor(1)]
            place = emit("Range", limits, dtype=torch.int64, shape=[shape[2]])
            inside = place < self.seqlens_k[:, None] + 1
            return attend_additively(query, keys, values, inside, attention.score)
        nothing = torch.zeros(self.seqlens_k.shape[0], 0, config.n_kv_head * config.head_dim)
        return torch.onnx.ops.symbolic(
            "com.microsoft::GroupQueryAttention",
            inputs=[query, nothing, nothing, *self],
            attrs={
                "num_heads": config.n_head,
                "kv_num_heads": config.n_kv_head,
                "causal": 0,
                "scale": 1.0,  # the exporter puts attention's scale into the queries' weights
            },
            dtype=query.dtype,
            shape=query.shape,
            version=1,
        )


def attend_additively(
    query: Tensor, keys: Tensor, values: Tensor, inside: Tensor, score: Tensor
) -> Tensor:
    """Attend from queries [batch, sequence, n_head · head_dim], in the shape of these.

    keys, values: [batch, n_head, n_source, head_dim], inside: bool [batch, n_source], which of them
    are of the source. score: v of each head, [n_head, head_dim]. Sums over a source are in order:
    padding changes no bit.
    """
    inside = inside[:, None, None]
    heads = query.unflatten(-1, score.shape).transpose(1, 2)[:, :, :, None]
    scores = ((heads + keys[:, :, None]).tanh() * score[:, None, None]).sum(dim=-1).float()
    scores = scores.masked_fill(~inside, -torch.inf)  # [batch, n_head, sequence, n_source]
    shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = shares / shares.cumsum(dim=-1)[..., -1:]
    held = values[:, :, None].masked_fill(~inside[..., None], 0.0)
    return merge_heads((weights[..., None] * held).cumsum(dim=-2)[..., -1, :])


class CrossAttention(nn.Module):
    """The cross-attention sublayer: queries of the target, keys and values of the source."""

    def __init__(self, config: TransformerConfig, encoder: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, shared = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(encoder.d_model, 2 * shared, bias=config.qkv_bias)
        self.output = nn.Linear(width, config.d_model, bias=config.output_bias)
        self.score: nn.Parameter | None = None
        if config.cross_attention == "additive":
            self.score = nn.Parameter(torch.empty(config.n_head, config.head_dim))
            nn.init.normal_(self.score, std=config.head_dim**-0.5)

    def forward(self, x: Tensor, source: Source | SourceRows) -> Tensor:
        """Attend from x [batch, sequence, d_model] to all of each row's source."""
        projected: Tensor = self.output(source.attend(self, self.query(x)))
        return projected

    def keys_and_values(self, hidden: Tensor) -> LayerCache:
        """Return those of a source, each [batch, n_kv_head, n_source, head_dim]."""
        heads = self.key_value(hidden).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return LayerCache(*heads.chunk(2, dim=1))
