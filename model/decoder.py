"""The decoder: norms, positions, feed-forward, blocks. Written once; trained, exported and checked from here."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import Attention, LayerCache, RotaryTable, StepInputs, rotary_table
from model.config import DecoderConfig


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight (Zhang & Sennrich 2019), exported as one operator."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                "RMSNormalization",
                inputs=[x, self.weight],
                attrs={"axis": -1, "epsilon": self.eps},
                dtype=x.dtype,
                shape=list(x.shape),
                version=23,
            )
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_norm(config: DecoderConfig) -> nn.Module:
    """RMSNorm, or LayerNorm with weight and bias (Ba et al. 2016)."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps)


def sinusoidal_table(config: DecoderConfig) -> Tensor:
    """[max_model_len, d_model]: sin and cos of p / 10000^(2i/d), interleaved (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), 10000.0**-pairs)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : config.d_model].float()


class FeedForward(nn.Module):
    """down(act(up x)), or SwiGLU: down(silu(gate x) · up x) with gate and up in one projection (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.kind = config.feed_forward
        widened = 2 * config.d_ff if self.kind == "swiglu" else config.d_ff
        self.up = nn.Linear(config.d_model, widened, bias=config.feed_forward_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.kind == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = functional.silu(gate) * hidden
        else:
            hidden = functional.gelu(hidden) if self.kind == "gelu" else functional.relu(hidden)
        lowered: Tensor = self.down(hidden)
        return lowered


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and a norm before it ("pre") or after the sum ("post")."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.pre = config.norm_placement == "pre"
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, table: RotaryTable | None) -> Tensor:
        attended = self.attention(self._before_attention(x), table)
        return self._after_attention(x, attended)

    def step(
        self, x: Tensor, table: RotaryTable | None, inputs: StepInputs, cache: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        attended, present = self.attention.step(self._before_attention(x), table, inputs, cache)
        return self._after_attention(x, attended), present

    def _before_attention(self, x: Tensor) -> Tensor:
        normed: Tensor = self.attention_norm(x) if self.pre else x
        return normed

    def _after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(attended)
        if self.pre:
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            x = self.attention_norm(x)
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class Decoder(nn.Module):
    """Token ids to next-token logits. Weights start as in GPT-2: normal(0, 0.02), residual projections narrower."""

    rotary_cos: Tensor
    rotary_sin: Tensor
    sinusoids: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.head = None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._add_positions()
        self.apply(self._initialise)
        self._narrow_residual_projections()

    def _add_positions(self) -> None:
        config = self.config
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_model_len, config.d_model)
        elif config.position == "sinusoidal":
            self.register_buffer("sinusoids", sinusoidal_table(config), persistent=False)
        else:
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
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self._embed(input_ids, position_ids)
        for block in self.blocks:
            x = block(x, self._rotary)
        return self._logits(x)

    def step(
        self, input_ids: Tensor, inputs: StepInputs, logits_indices: Tensor, caches: list[LayerCache]
    ) -> tuple[Tensor, list[LayerCache]]:
        """The serving graph: run new tokens over cached rows.

        input_ids: [batch, sequence]. logits_indices: int64 [rows], which of the batch · sequence positions want logits.
        Returns logits [rows, vocab] and the rows with the new keys and values appended.
        """
        x = self._embed(input_ids, inputs.position_ids)
        presents = []
        for block, cache in zip(self.blocks, caches, strict=True):
            assert isinstance(block, Block)
            x, present = block.step(x, self._rotary, inputs, cache)
            presents.append(present)
        return self._logits(x.flatten(0, 1).index_select(0, logits_indices)), presents

    @property
    def _rotary(self) -> RotaryTable | None:
        return RotaryTable(self.rotary_cos, self.rotary_sin) if self.config.position == "rotary" else None

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids)
        if self.config.position == "learned":
            x = x + self.position_embedding(position_ids)
        elif self.config.position == "sinusoidal":
            x = x * math.sqrt(self.config.d_model) + self.sinusoids[position_ids]
        dropped: Tensor = self.dropout(x)
        return dropped

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x), weight)
