"""A block: attention or a recurrence, and a feed-forward, with residuals and norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, nn

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import DeltaRule, Lstm, Mamba, Mamba2, ShortConvolution
from kvasir.model.network.attention import Attention, LayerCache, RunInputs
from kvasir.model.network.cross_attention import CrossAttention, Source, SourceRows
from kvasir.model.network.feed_forward import FeedForward, Mixture
from kvasir.model.network.latent_attention import LatentAttention
from kvasir.model.network.norm import make_norm
from kvasir.model.network.positions import Positions
from kvasir.model.network.recurrent.delta_rule import DeltaRuleMixer
from kvasir.model.network.recurrent.lstm import LstmMixer
from kvasir.model.network.recurrent.mamba import MambaMixer
from kvasir.model.network.recurrent.mamba2 import Mamba2Mixer
from kvasir.model.network.recurrent.mixer import Mixer
from kvasir.model.network.recurrent.short_convolution import ShortConvolutionMixer

LAYER_MARK = "kvasir::LayerMark"  # an operator that the exporter takes out again
# What a layer keeps of a row: a LayerCache, the state of a recurrent layer, or one and the other.
Cache = tuple[Tensor, ...]
MIXERS: dict[type, Callable[..., Mixer]] = {
    DeltaRule: DeltaRuleMixer,
    Lstm: LstmMixer,
    Mamba: MambaMixer,
    Mamba2: Mamba2Mixer,
    ShortConvolution: ShortConvolutionMixer,
}


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and norms as `norm_placement` says.

    Between them, in a decoder with an encoder, is cross-attention. A recurrent layer has a `Mixer`
    in attention's place, or beside it.
    """

    attention: Attention

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.placement_of(layer)
        self.parallel = config.parallel_residual
        before, after = self.placement != "output", self.placement in ("both", "output")
        normed = before and layer not in config.layers_without_attention_norm
        self.attention_norm = make_norm(config) if normed else nn.Identity()
        self.recurrence: Mixer | None = None
        if layer in config.recurrent_layers:
            self.recurrence = MIXERS[type(config.recurrence)](config, config.recurrence)
        self.attends = config.attends(layer)
        if self.attends:
            kind = Attention if config.latents is None else LatentAttention
            self.attention = kind(config, layer)
        self.cross_attention = None
        if config.encoder is not None and config.n_source_layer:
            self.cross_attention_norm = make_norm(config)
            self.cross_attention = CrossAttention(config, config.encoder)
        self.feed_forward: nn.Module | None = None
        self.feed_forward_norm: nn.Module = nn.Identity()
        if layer not in config.layers_without_feed_forward:
            self.feed_forward_norm = make_norm(config) if before else nn.Identity()
            mixes = config.has_experts(layer)
            self.feed_forward = Mixture(config) if mixes else FeedForward(config)
        self.attention_output_norm = make_norm(config) if after else nn.Identity()
        after = after or (config.mixture_norm and config.has_experts(layer))
        self.feed_forward_output_norm = make_norm(config) if after else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions, source: Source | None = None) -> Tensor:
        """Run whole sequences x [batch, sequence, d_model]."""
        given = self._attention_input(x)
        outputs = [self.attention(given, positions)] if self.attends else []
        if self.recurrence is not None:
            outputs.append(self.recurrence(given, positions, source))
        return self._finish(x, reduce(torch.add, outputs), source)

    def step(
        self,
        x: Tensor,
        positions: Positions,
        inputs: RunInputs,
        cache: Cache,
        source: SourceRows | None = None,
    ) -> tuple[Tensor, Cache]:
        """Run new tokens x [..., d_model] over what is cached, and over their sources' keys."""
        x = _mark(x)
        normed, outputs, present = self._attention_input(x), list[Tensor](), Cache()
        if self.attends:
            kept, cache = LayerCache(*cache[:2]), cache[2:]
            attended, rows = self.attention.step(normed, positions, inputs, kept)
            outputs, present = [attended], rows
        if self.recurrence is not None:
            read, state = self.recurrence.step(normed, positions, inputs, cache)
            outputs, present = [*outputs, read], (*present, *state)
        return _mark(self._finish(x, reduce(torch.add, outputs), source)), present

    def empty_cache(self, x: Tensor, n_positions: int) -> Cache:
        """Return what the layer keeps before the first token, for each row of x."""
        state = () if self.recurrence is None else self.recurrence.empty_state(x)
        if not self.attends:
            return state
        config = self.attention.config
        empty = x.new_zeros(x.shape[0], config.n_kv_head, n_positions, config.head_dim)
        return empty, empty, *state

    def _attention_input(self, x: Tensor) -> Tensor:
        normed: Tensor = x if self.placement == "post" else self.attention_norm(x)
        return normed

    def _finish(self, x: Tensor, attended: Tensor, source: Source | SourceRows | None) -> Tensor:
        """Add what was attended to x, then what its source holds, and then the feed-forward."""
        if self.placement == "post":
            between: Tensor = self.attention_norm(x + self.dropout(attended))
            if self.cross_attention is not None:
                read = self.cross_attention(between, source)
                between = self.cross_attention_norm(between + self.dropout(read))
            assert self.feed_forward is not None, "layers without it have norms before sublayers"
            lowered = self.feed_forward(between)
            normed: Tensor = self.feed_forward_norm(between + self.dropout(lowered))
            return normed
        between = x + self.dropout(self.attention_output_norm(attended))
        if self.cross_attention is not None:
            read = self.cross_attention(self.cross_attention_norm(between), source)
            between = between + self.dropout(read)
        if self.feed_forward is None:
            return between
        lowered = self.feed_forward(self.feed_forward_norm(x if self.parallel else between))
        after: Tensor = between + self.dropout(self.feed_forward_output_norm(lowered))
        return after


def _mark(x: Tensor) -> Tensor:
    """Return x, which an exported graph marks as a layer's input or output."""
    if not torch.onnx.is_in_onnx_export():
        return x
    return torch.onnx.ops.symbolic(LAYER_MARK, [x], dtype=x.dtype, shape=x.shape)
