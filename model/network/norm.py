"""Norms: RMSNorm or LayerNorm over a token, RMSNorm over each of its heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig


class HeadNorm(nn.Module):
    """RMSNorm over each head of queries or keys (Henry et al. 2020), or over all at once."""

    def __init__(self, n_heads: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, config.head_dim))
        self.across, self.eps = config.qk_norm_across_heads, config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., n_heads · head_dim]."""
        heads = x if self.across else x.unflatten(-1, self.weight.shape)
        ones = torch.ones(heads.shape[-1], dtype=x.dtype, device=x.device)
        normed = functional.rms_norm(heads, ones.shape, ones, self.eps)
        return (normed.view(*x.shape[:-1], *self.weight.shape) * self.weight).flatten(-2)


def make_norm(config: TransformerConfig) -> nn.Module:
    """Make an RMSNorm (Zhang & Sennrich 2019) or a LayerNorm (Ba et al. 2016)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.norm_bias)
