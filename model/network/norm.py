"""Norms over a token and over each of its heads, and limits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig


class HeadNorm(nn.Module):
    """A norm over each head of queries or keys (Henry et al. 2020), or RMSNorm over all at once."""

    def __init__(self, n_heads: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, config.head_dim))
        self.across, self.eps = config.qk_norm_across_heads, config.norm_eps
        self.centred = config.qk_norm_kind == "layernorm"
        biased = config.has_head_norm_bias
        self.bias = nn.Parameter(torch.zeros(n_heads, config.head_dim)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., n_heads · head_dim]."""
        heads = x if self.across else x.unflatten(-1, self.weight.shape)
        ones = torch.ones(heads.shape[-1], dtype=x.dtype, device=x.device)
        if self.centred:
            normed = functional.layer_norm(heads, ones.shape, ones, None, self.eps)
        else:
            normed = functional.rms_norm(heads, ones.shape, ones, self.eps)
        normed = normed.view(*x.shape[:-1], *self.weight.shape) * self.weight
        return (normed if self.bias is None else normed + self.bias).flatten(-2)


class Clip(nn.Module):
    """Limits of queries, keys and values, and factors of 1 after them.

    An exporter puts its scales of channels into the factors: before the limits they would move
    these.
    """

    def __init__(self, limit: float, width: int) -> None:
        super().__init__()
        self.limit = limit
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, qkv: Tensor) -> Tensor:
        """Limit qkv [..., width], in float32: CUDA limits no numbers of 16 bits."""
        return qkv.float().clamp(-self.limit, self.limit).to(qkv.dtype) * self.weight


def make_norm(config: TransformerConfig) -> nn.Module:
    """Make an RMSNorm (Zhang & Sennrich 2019) or a LayerNorm (Ba et al. 2016)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.norm_bias)
