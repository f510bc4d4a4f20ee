"""The decoder: blocks, embeddings, head. Written once; trained, exported and verified from here."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import TransformerConfig
from model.network.attention import Attention, LayerCache, RunInputs
from model.network.feed_forward import ExpertLinear, FeedForward, Mixture
from model.network.norm import make_norm
from model.network.positions import (
    Positions,
    RotaryTable,
    alibi_table,
    distances,
    query_scale_table,
    relative_buckets,
    rotary_table,
    sinusoidal_table,
)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and norms as `norm_placement` says."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.parallel = config.parallel_residual
        before, after = self.placement != "output", self.placement in ("both", "output")
        self.attention_norm = make_norm(config) if before else nn.Identity()
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config) if before else nn.Identity()
        self.feed_forward = Mixture(config) if config.has_experts(layer) else FeedForward(config)
        self.attention_output_norm = make_norm(config) if after else nn.Identity()
        self.feed_forward_output_norm = make_norm(config) if after else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Run whole sequences x [batch, sequence, d_model]."""
        return self._finish(x, self.attention(self._attention_input(x), positions))

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Run new tokens x [..., d_model] over cached keys and values."""
        attended, present = self.attention.step(self._attention_input(x), positions, inputs, cache)
        return self._finish(x, attended), present

    def _attention_input(self, x: Tensor) -> Tensor:
        normed: Tensor = x if self.placement == "post" else self.attention_norm(x)
        return normed

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add what was attended to x, and then the feed-forward."""
        if self.placement == "post":
            between = self.attention_norm(x + self.dropout(attended))
            lowered = self.feed_forward(between)
            normed: Tensor = self.feed_forward_norm(between + self.dropout(lowered))
            return normed
        between = x + self.dropout(self.attention_output_norm(attended))
        lowered = self.feed_forward(self.feed_forward_norm(x if self.parallel else between))
        after: Tensor = between + self.dropout(self.feed_forward_output_norm(lowered))
        return after


def position_tables(config: TransformerConfig) -> dict[str, Tensor]:
    """Return the decoder's constants about positions, by the names of its buffers."""
    if config.position == "sinusoidal":
        return {"sinusoids": sinusoidal_table(config)}
    if config.position == "alibi":
        return {"alibi": alibi_table(config)}
    if config.position == "relative":
        return {"buckets": relative_buckets(config)}
    if config.position == "rotary":
        tables = dict(zip(("rotary_cos", "rotary_sin"), rotary_table(config), strict=True))
        if config.sliding_window_rope_theta is not None:
            in_windows = rotary_table(config, in_windows=True)
            tables |= zip(("window_cos", "window_sin"), in_windows, strict=True)
        if (query_scales := query_scale_table(config)) is not None:
            tables["query_scales"] = query_scales
        return tables
    return {}


class Transformer(nn.Module):
    """Token ids to next-token logits. Weights start as in GPT-2, with narrower projections."""

    sinusoids: Tensor
    alibi: Tensor
    buckets: Tensor
    rotary_cos: Tensor
    rotary_sin: Tensor
    window_cos: Tensor
    window_sin: Tensor
    query_scales: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.Identity() if config.norm_placement == "post" else make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = None
        if not config.tied_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_model_len, config.d_model)
        elif config.position == "relative":
            self.relative_bias = nn.Embedding(config.relative_buckets, config.n_head)
        for name, table in position_tables(config).items():
            self.register_buffer(name, table, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear | ExpertLinear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        std = 0.02 / math.sqrt(2 * config.n_layer)
        for name, weight in self.blocks.named_parameters():
            if name.endswith(("attention.output.weight", "down.weight")):
                nn.init.normal_(weight, std=std)

    @property
    def n_parameters(self) -> int:
        """The number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [batch, sequence, vocab] of whole sequences; also serving's oracle."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids, place[None])
        positions = self.positions(place[None], lambda: place)
        for block in self.blocks:
            x = block(x, positions)
        return self._logits(x)

    def step(
        self, input_ids: Tensor, inputs: RunInputs, logits_indices: Tensor, caches: list[LayerCache]
    ) -> tuple[Tensor, list[LayerCache]]:
        """Run new tokens over cached keys and values, as the serving graph does.

        input_ids: [batch, sequence] over rows, or [tokens] over blocks. logits_indices: int64
        [rows], the tokens that want logits. Returns logits [rows, vocab] and the caches with the
        new keys and values.
        """
        x = self.embed(input_ids, inputs.position_ids)
        positions = self.positions(inputs.position_ids, lambda: inputs.key_positions(caches[0]))
        presents = []
        for block, cache in zip(self.blocks, caches, strict=True):
            assert isinstance(block, Block)
            x, present = block.step(x, positions, inputs, cache)
            presents.append(present)
        return self._logits(x.flatten(0, -2).index_select(0, logits_indices)), presents

    def positions(self, of_queries: Tensor, of_keys: Callable[[], Tensor]) -> Positions:
        """Return what attention has to know of positions.

        of_queries: [batch, sequence]. of_keys: returns [n_keys]; it is called for biases only.
        """
        position = self.config.position
        if position == "rotary":
            windowed = hasattr(self, "window_cos")
            own = RotaryTable(self.window_cos, self.window_sin) if windowed else None
            scale = self.query_scales[of_queries] if hasattr(self, "query_scales") else None
            rotary = RotaryTable(self.rotary_cos, self.rotary_sin)
            return Positions(rotary, rotary_in_windows=own, query_scale=scale)
        if position == "alibi":
            by_head = self.alibi[:, distances(of_queries, of_keys())]
            return Positions(bias=by_head.transpose(0, 1))
        if position == "relative":  # embedded as [batch, sequence, n_keys, n_head]
            learned = self.relative_bias(self.buckets[distances(of_queries, of_keys())])
            return Positions(bias=learned.permute(0, 3, 1, 2))
        return Positions()

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the first block's input [..., d_model]."""
        x: Tensor = self.embedding(input_ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        x = self.embedding_norm(x)
        if self.config.position == "learned":
            x = x + self.position_embedding(position_ids)
        elif self.config.position == "sinusoidal":
            x = x * math.sqrt(self.config.d_model) + self.sinusoids[position_ids]
        dropped: Tensor = self.dropout(x)
        return dropped

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        bias = None if self.head is None else self.head.bias
        return self.project(self.norm(x), weight, bias)

    def project(self, normed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of tokens that have these rows [tokens, d_model] in the head."""
        logits = functional.linear(normed, weight)
        if bias is not None:
            logits = logits + bias
        if cap := self.config.logit_softcap:
            logits = cap * (logits / cap).tanh()
        return logits
