"""Cross-attention: a target's tokens attend to the vectors of its source (Vaswani et al. 2017)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import TransformerConfig
from model.network.attention import LayerCache, merge_heads


class Source(NamedTuple):
    """Encoded sources: vectors [batch, n_source, d_model], and the tokens of each row, [batch].

    Rows are padded after them.
    """

    hidden: Tensor
    lengths: Tensor


class CrossAttention(nn.Module):
    """The cross-attention sublayer: queries of the target, keys and values of the source."""

    def __init__(self, config: TransformerConfig, encoder: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, shared = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.query = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.key_value = nn.Linear(encoder.d_model, 2 * shared, bias=config.qkv_bias)
        self.output = nn.Linear(width, config.d_model, bias=config.output_bias)

    def forward(self, x: Tensor, source: Source) -> Tensor:
        """Attend from x [batch, sequence, d_model] to all of each row's source."""
        place = torch.arange(source.hidden.shape[1], device=x.device)
        attended = functional.scaled_dot_product_attention(
            self.query(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2),
            *self.keys_and_values(source.hidden),
            attn_mask=(place < source.lengths[:, None])[:, None, None],
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            scale=self.config.query_scale,
            enable_gqa=self.config.n_groups > 1,
        )
        projected: Tensor = self.output(merge_heads(attended))
        return projected

    def keys_and_values(self, hidden: Tensor) -> LayerCache:
        """Return those of a source, each [batch, n_kv_head, n_source, head_dim]."""
        heads = self.key_value(hidden).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return LayerCache(*heads.chunk(2, dim=1))
