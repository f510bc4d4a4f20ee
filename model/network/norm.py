"""Norms: RMSNorm and LayerNorm over a token, RMSNorm over each of its heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import DecoderConfig


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight (Zhang & Sennrich 2019), exported as one operator."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x [..., size]."""
        return _rms_norm(x, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm over each head of queries or keys (Henry et al. 2020)."""

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each head of x [..., n_heads · head_dim]."""
        heads = x.unflatten(-1, self.weight.shape)
        ones = torch.ones(self.weight.shape[1], dtype=x.dtype, device=x.device)
        return (_rms_norm(heads, ones, self.eps) * self.weight).flatten(-2)


def make_norm(config: DecoderConfig) -> nn.Module:
    """Make an RMSNorm, or a LayerNorm with weight and bias (Ba et al. 2016)."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension; torch's own function would be exported as five operators."""
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic(
            "RMSNormalization",
            inputs=[x, weight],
            attrs={"axis": -1, "epsilon": eps},
            dtype=x.dtype,
            shape=list(x.shape),
            version=23,
        )
    return functional.rms_norm(x, weight.shape, weight, eps)
