"""The decoder: feed-forward, blocks, embeddings, head. Written once; trained, exported and checked from here."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import DecoderConfig
from model.network.attention import Attention, LayerCache, RunInputs
from model.network.norm import make_norm
from model.network.positions import (
    Positions,
    RotaryTable,
    alibi_table,
    distances,
    relative_buckets,
    rotary_table,
    sinusoidal_table,
)

_FEED_FORWARDS: dict[
    str, tuple[Callable[[Tensor], Tensor], bool]
] = {  # the activation, and whether it gates
    "swiglu": (functional.silu, True),
    "geglu": (functional.gelu, True),
    "geglu_tanh": (partial(functional.gelu, approximate="tanh"), True),
    "gelu": (functional.gelu, False),
    "gelu_tanh": (partial(functional.gelu, approximate="tanh"), False),
    "relu": (functional.relu, False),
}


class FeedForward(nn.Module):
    """down(act(up x)), or gated: down(act(gate x) · up x) with gate and up in one projection (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation, self.gated = _FEED_FORWARDS[config.feed_forward]
        widened = 2 * config.d_ff if self.gated else config.d_ff
        self.up = nn.Linear(config.d_model, widened, bias=config.feed_forward_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        lowered: Tensor = self.down(hidden)
        return lowered


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and norms as `norm_placement` says."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.norm_placement
        self.parallel = config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        if self.placement == "both":
            self.attention_output_norm = make_norm(config)
            self.feed_forward_output_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        return self._after_attention(x, self.attention(self._before_attention(x), positions))

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        attended, present = self.attention.step(self._before_attention(x), positions, inputs, cache)
        return self._after_attention(x, attended), present

    def _before_attention(self, x: Tensor) -> Tensor:
        normed: Tensor = x if self.placement == "post" else self.attention_norm(x)
        return normed

    def _after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        if self.placement == "post":
            x = self.attention_norm(x + self.dropout(attended))
            normed: Tensor = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
            return normed
        if self.placement == "both":
            attended = self.attention_output_norm(attended)
        between = x + self.dropout(attended)
        lowered = self.feed_forward(self.feed_forward_norm(x if self.parallel else between))
        if self.placement == "both":
            lowered = self.feed_forward_output_norm(lowered)
        after: Tensor = between + self.dropout(lowered)
        return after


class Decoder(nn.Module):
    """Token ids to next-token logits. Weights start as in GPT-2: normal(0, 0.02), residual projections narrower."""

    rotary_cos: Tensor
    rotary_sin: Tensor
    sinusoids: Tensor
    alibi: Tensor
    buckets: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.Identity() if config.norm_placement == "post" else make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = (
            None
            if config.tied_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        self._add_positions()
        self.apply(self._initialise)
        self._narrow_residual_projections()

    def _add_positions(self) -> None:
        config = self.config
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_model_len, config.d_model)
        elif config.position == "sinusoidal":
            self.register_buffer("sinusoids", sinusoidal_table(config), persistent=False)
        elif config.position == "alibi":
            self.register_buffer("alibi", alibi_table(config), persistent=False)
        elif config.position == "relative":
            self.relative_bias = nn.Embedding(config.relative_buckets, config.n_head)
            self.register_buffer("buckets", relative_buckets(config), persistent=False)
        elif config.position == "rotary":
            table = rotary_table(config)
            self.register_buffer("rotary_cos", table.cos, persistent=False)
            self.register_buffer("rotary_sin", table.sin, persistent=False)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def _narrow_residual_projections(self) -> None:
        std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.output.weight, std=std)
            nn.init.normal_(block.feed_forward.down.weight, std=std)

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, sequence] at positions 0, 1, … → logits [batch, sequence, vocab]. Training, and the oracle."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self._embed(input_ids, place[None])
        positions = Positions(
            self._rotary, self._bias(place[None], place) if self._biased else None
        )
        for block in self.blocks:
            x = block(x, positions)
        return self._logits(x)

    def step(
        self, input_ids: Tensor, inputs: RunInputs, logits_indices: Tensor, caches: list[LayerCache]
    ) -> tuple[Tensor, list[LayerCache]]:
        """The serving graph: run new tokens over cached keys and values.

        input_ids: [batch, sequence] over rows, or [tokens] over blocks. logits_indices: int64 [rows], which of them
        want logits. Returns logits [rows, vocab] and the caches with the new keys and values.
        """
        x = self._embed(input_ids, inputs.position_ids)
        bias = (
            self._bias(inputs.position_ids, inputs.key_positions(caches[0]))
            if self._biased
            else None
        )
        positions = Positions(self._rotary, bias)
        presents = []
        for block, cache in zip(self.blocks, caches, strict=True):
            assert isinstance(block, Block)
            x, present = block.step(x, positions, inputs, cache)
            presents.append(present)
        return self._logits(x.flatten(0, -2).index_select(0, logits_indices)), presents

    @property
    def _rotary(self) -> RotaryTable | None:
        return (
            RotaryTable(self.rotary_cos, self.rotary_sin)
            if self.config.position == "rotary"
            else None
        )

    @property
    def _biased(self) -> bool:
        return self.config.position in ("alibi", "relative")

    def _bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """On scores: [batch, n_head, sequence, n_keys], of positions [batch, sequence] and [n_keys]."""
        apart = distances(query_positions, key_positions)
        if self.config.position == "alibi":
            return self.alibi[:, apart].transpose(0, 1)
        learned: Tensor = self.relative_bias(
            self.buckets[apart]
        )  # [batch, sequence, n_keys, n_head]
        return learned.permute(0, 3, 1, 2)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.config.position == "learned":
            x = x + self.position_embedding(position_ids)
        elif self.config.position == "sinusoidal":
            x = x * math.sqrt(self.config.d_model) + self.sinusoids[position_ids]
        dropped: Tensor = self.dropout(x)
        return dropped

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = functional.linear(self.norm(x), weight)
        if cap := self.config.logit_softcap:
            logits = cap * (logits / cap).tanh()
        return logits
