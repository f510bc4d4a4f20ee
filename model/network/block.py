"""A block of the Transformer: attention and feed-forward, with residuals and norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import Attention, LayerCache, RunInputs
from kvasir.model.network.cross_attention import CrossAttention, Source, SourceRows
from kvasir.model.network.feed_forward import FeedForward, Mixture
from kvasir.model.network.latent_attention import LatentAttention
from kvasir.model.network.norm import make_norm
from kvasir.model.network.positions import Positions

LAYER_MARK = "kvasir::LayerMark"  # an operator that the exporter takes out again


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and norms as `norm_placement` says.

    Between them, in a decoder with an encoder, is cross-attention.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.parallel = config.parallel_residual
        before, after = self.placement != "output", self.placement in ("both", "output")
        normed = before and layer not in config.layers_without_attention_norm
        self.attention_norm = make_norm(config) if normed else nn.Identity()
        kind = Attention if config.latents is None else LatentAttention
        self.attention = kind(config, layer)
        self.cross_attention = None
        if config.encoder is not None:
            self.cross_attention_norm = make_norm(config)
            self.cross_attention = CrossAttention(config, config.encoder)
        self.feed_forward_norm = make_norm(config) if before else nn.Identity()
        self.feed_forward = Mixture(config) if config.has_experts(layer) else FeedForward(config)
        self.attention_output_norm = make_norm(config) if after else nn.Identity()
        after = after or (config.mixture_norm and config.has_experts(layer))
        self.feed_forward_output_norm = make_norm(config) if after else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions, source: Source | None = None) -> Tensor:
        """Run whole sequences x [batch, sequence, d_model]."""
        return self._finish(x, self.attention(self._attention_input(x), positions), source)

    def step(
        self,
        x: Tensor,
        positions: Positions,
        inputs: RunInputs,
        cache: LayerCache,
        source: SourceRows | None = None,
    ) -> tuple[Tensor, LayerCache]:
        """Run new tokens x [..., d_model] over cached keys and values, and over their sources'."""
        x = _mark(x)
        attended, present = self.attention.step(self._attention_input(x), positions, inputs, cache)
        return _mark(self._finish(x, attended, source)), present

    def _attention_input(self, x: Tensor) -> Tensor:
        normed: Tensor = x if self.placement == "post" else self.attention_norm(x)
        return normed

    def _finish(self, x: Tensor, attended: Tensor, source: Source | SourceRows | None) -> Tensor:
        """Add what was attended to x, then what its source holds, and then the feed-forward."""
        if self.placement == "post":
            between = self.attention_norm(x + self.dropout(attended))
            if self.cross_attention is not None:
                read = self.cross_attention(between, source)
                between = self.cross_attention_norm(between + self.dropout(read))
            lowered = self.feed_forward(between)
            normed: Tensor = self.feed_forward_norm(between + self.dropout(lowered))
            return normed
        between = x + self.dropout(self.attention_output_norm(attended))
        if self.cross_attention is not None:
            read = self.cross_attention(self.cross_attention_norm(between), source)
            between = between + self.dropout(read)
        lowered = self.feed_forward(self.feed_forward_norm(x if self.parallel else between))
        after: Tensor = between + self.dropout(self.feed_forward_output_norm(lowered))
        return after


def _mark(x: Tensor) -> Tensor:
    """Return x, which an exported graph marks as a layer's input or output."""
    if not torch.onnx.is_in_onnx_export():
        return x
    return torch.onnx.ops.symbolic(LAYER_MARK, [x], dtype=x.dtype, shape=x.shape)
