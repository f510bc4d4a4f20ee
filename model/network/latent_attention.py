"""Latent attention: one vector a token makes the keys and values of all heads (DeepSeek-V2, 2024).

What makes a head's key of a latent is applied to its query instead, q · (c Kᵀ) = (q K) · c, and
what makes its value to the mean of latents that it attends to. So attention has one key-value head,
whose key is the latent and a part that is turned, and whose value is the same: it is all that a
cache has to hold. A step thus reads head_dim numbers a token and not those of every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import Attention
from kvasir.model.network.positions import Positions, RotaryTable, turn

_EPS = 1e-6  # of the norms of latents, whatever a model's other norms have


class HeadLinear(nn.Module):
    """A matrix [n_in, n_out] for each head."""

    def __init__(self, n_heads: int, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads, n_in, n_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., n_heads, n_in] to [..., n_heads, n_out]."""
        equation = "...hi,hio->...ho"
        if not torch.onnx.is_in_onnx_export():
            return torch.einsum(equation, x, self.weight)
        shape = [*x.shape[:-1], self.weight.shape[2]]
        inputs = [x, self.weight]
        attributes: dict[str, Any] = {"equation": equation}
        return torch.onnx.ops.symbolic("Einsum", inputs, attributes, dtype=x.dtype, shape=shape)


class LatentAttention(Attention):
    """The attention sublayer over latents."""

    def add_projections(self, config: TransformerConfig) -> None:
        """Make the modules before and after attention."""
        assert config.latents is not None
        assert config.rotary_dim is not None
        self.latents, self.rotary_dim = config.latents, config.rotary_dim
        rank, query_rank = self.latents.rank, self.latents.query_rank
        self.query_latent: nn.Module = nn.Identity()
        self.query_latent_norm: nn.Module = nn.Identity()
        if query_rank is not None:
            self.query_latent = nn.Linear(config.d_model, query_rank, bias=False)
            self.query_latent_norm = nn.RMSNorm(query_rank, _EPS)
        width = config.n_head * (self.latents.key_dim + self.rotary_dim)
        self.query = nn.Linear(query_rank or config.d_model, width, bias=False)
        self.latent = nn.Linear(config.d_model, config.head_dim, bias=False)
        self.latent_norm = nn.RMSNorm(rank, _EPS)
        self.key_up = HeadLinear(config.n_head, self.latents.key_dim, rank)
        self.value_up = HeadLinear(config.n_head, rank, self.latents.value_dim)
        if config.attention_gate:  # of each head
            self.gate = nn.Linear(config.d_model, config.n_head, bias=False)
        width = config.n_head * self.latents.value_dim
        self.output = nn.Linear(width, config.d_model, bias=config.output_bias)

    def project(self, x: Tensor, positions: Positions) -> Tensor:
        """Return queries, and the key twice, of x: [..., (n_head + 2) · head_dim]."""
        query: Tensor = self.query(self.query_latent_norm(self.query_latent(x)))
        query = query.unflatten(-1, (self.config.n_head, -1))
        fixed, turned = query.split([self.latents.key_dim, self.rotary_dim], dim=-1)
        latent, own = self.latent(x).split([self.latents.rank, self.rotary_dim], dim=-1)
        if self.turns and (angles := positions.of_tokens):
            turned = turn(turned, RotaryTable(*(part[..., None, :] for part in angles)))
            own = turn(own, angles)
        queries = torch.cat((self.key_up(fixed), turned), dim=-1).flatten(-2)
        key = torch.cat((self.latent_norm(latent), own), dim=-1)
        return torch.cat((queries, key, key), dim=-1)

    def lower(self, attended: Tensor) -> Tensor:
        """Return the sublayer's output of what is attended, [..., n_head · head_dim]."""
        heads = attended.unflatten(-1, (self.config.n_head, -1))[..., : self.latents.rank]
        return super().lower(self.value_up(heads).flatten(-2))
