"""Pooling: one vector of a text from the vectors of its tokens, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import Pooling, TransformerConfig
from kvasir.model.configuration.parts import Projection

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Projector(nn.Module):
    """A linear layer, its activation, and perhaps a norm."""

    def __init__(self, d_in: int, projection: Projection, config: TransformerConfig) -> None:
        super().__init__()
        d_out = projection.d_out
        self.linear = nn.Linear(d_in, d_out, bias=projection.bias)
        self.activation = _ACTIVATIONS[projection.activation]
        self.norm: nn.Module = nn.Identity()
        if projection.norm:
            self.norm = nn.LayerNorm(d_out, config.norm_eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_in] to [..., d_out]."""
        normed: Tensor = self.norm(self.activation(self.linear(x)))
        return normed


class Pooler(nn.Module):
    """Vectors of tokens to one of the text, as `Pooling` says."""

    def __init__(self, config: TransformerConfig, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling
        widths = [config.d_model, *(projection.d_out for projection in pooling.projections)]
        self.projections = nn.ModuleList(
            Projector(d_in, projection, config)
            for d_in, projection in zip(widths, pooling.projections, strict=False)
        )

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Map hidden [batch, sequence, d_model] to [batch, d_out]; lengths: [batch], of rows."""
        return self.project(self.pool(hidden, lengths))

    def pool(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Return [batch, d_model]: a token of each row, or the mean of its tokens."""
        if self.pooling.kind == "cls":
            return hidden[:, 0]
        is_mean = self.pooling.kind == "mean"
        sums = hidden.cumsum(dim=1) if is_mean else hidden  # in order: padding changes no bit
        ends = (lengths - 1)[:, None, None].expand(-1, 1, sums.shape[2])
        last = sums.gather(1, ends)[:, 0]
        return last / lengths[:, None] if is_mean else last

    def project(self, pooled: Tensor) -> Tensor:
        """Map pooled vectors [..., d_model] to [..., d_out]."""
        for projection in self.projections:
            pooled = projection(pooled)
        return functional.normalize(pooled, dim=-1) if self.pooling.normalize else pooled
