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


class CrossAttention(nn.Module):
    """The cross-attention sublayer: queries of the target, keys and values of the source."""

    def __init__(self, config: TransformerConfig, encoder: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, shared = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(encoder.d_model, 2 * shared, bias=config.qkv_bias)
        self.output = nn.Linear(width, config.d_model, bias=config.output_bias)

    def forward(self, x: Tensor, source: Source | SourceRows) -> Tensor:
        """Attend from x [batch, sequence, d_model] to all of each row's source."""
        projected: Tensor = self.output(source.attend(self, self.query(x)))
        return projected

    def keys_and_values(self, hidden: Tensor) -> LayerCache:
        """Return those of a source, each [batch, n_kv_head, n_source, head_dim]."""
        heads = self.key_value(hidden).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return LayerCache(*heads.chunk(2, dim=1))
