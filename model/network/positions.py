"""Where a token stands: rotary angles and their scalings, sinusoids, and biases on scores by distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import DecoderConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of position · frequency, each [n_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """What attention is told of positions.

    rotary: the angles, for the layers that turn queries and keys. bias: [batch, n_head, sequence, n_keys], added to
    scores; batch may be 1.
    """

    rotary: RotaryTable | None = None
    bias: Tensor | None = None


def rotary_table(config: DecoderConfig) -> RotaryTable:
    """Angles p · θ^(-2i/d) for every position p and pair i (Su et al. 2021, section 3.2.2), scaled as the model wants.

    The pairs beyond `rotary_dim` do not turn.
    """
    rotary_dim = config.rotary_dim or config.head_dim
    frequencies = config.rope_theta ** -(
        torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    )
    amplitude = 1.0
    if scaling := config.rope_scaling:
        frequencies = _scale_frequencies(frequencies, scaling, config.rope_theta)
        if scaling.kind == "yarn":
            amplitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), frequencies)
    still = (config.max_model_len, (config.head_dim - rotary_dim) // 2)
    cos = torch.cat((angles.cos() * amplitude, torch.ones(still)), dim=1)
    sin = torch.cat((angles.sin() * amplitude, torch.zeros(still)), dim=1)
    return RotaryTable(cos.float(), sin.float())


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """frequencies [rotary_dim / 2], in radians a position, as RopeScaling says."""
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear" or scaling.original_max_model_len is None:
        return stretched
    turns = scaling.original_max_model_len * frequencies / (2 * math.pi)  # in the original context
    if scaling.kind == "llama3":  # Llama 3.1's reference code: apply_scaling
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:  # Peng et al. 2023, section 3.2, blended by pair as in their code, not by turns as in their text
        low, high = (
            _pair_of(t, scaling, theta, 2 * len(frequencies))
            for t in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        kept = 1.0 - ((torch.arange(len(frequencies)) - low) / max(high - low, 0.001)).clamp(
            0.0, 1.0
        )
    return kept * frequencies + (1.0 - kept) * stretched


def _pair_of(turns: float, scaling: RopeScaling, theta: float, rotary_dim: int) -> float:
    """The pair, as a real number, that turns so often in the original context: θ^(2i/d) = context / (2π · turns)."""
    assert scaling.original_max_model_len is not None
    wavelength = scaling.original_max_model_len / (2 * math.pi * turns)
    return rotary_dim * math.log(wavelength) / (2 * math.log(theta))


def rotate(x: Tensor, table: RotaryTable, position_ids: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of heads x [batch, heads, sequence, head_dim] by their positions [batch, sequence]."""
    cos = table.cos[position_ids][:, None]  # [batch, 1, sequence, head_dim / 2]
    sin = table.sin[position_ids][:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def sinusoidal_table(config: DecoderConfig) -> Tensor:
    """[max_model_len, d_model]: sin and cos of p / 10000^(2i/d), interleaved (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), 10000.0**-pairs)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : config.d_model].float()


def alibi_slopes(n_head: int) -> list[float]:
    """2^(-8i/n) for heads i = 1 … n; where n is no power of 2, n of those of the two nearest (Press et al. 2022).

    The powers come first: those of the lower power of 2, then every other one of the higher.
    """
    lower = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return slopes + [2 ** (-4 * i / lower) for i in range(1, 2 * (n_head - lower), 2)]


def alibi_table(config: DecoderConfig) -> Tensor:
    """[n_head, max_model_len]: a head's bias for each distance to the key."""
    return -torch.outer(
        torch.tensor(alibi_slopes(config.n_head)), torch.arange(config.max_model_len).float()
    )


def relative_buckets(config: DecoderConfig) -> Tensor:
    """int64 [max_model_len]: the bucket of each distance to a key that comes before (Raffel et al. 2020, section 2.1).

    The first half of the buckets are single distances; the others widen logarithmically, the last to all beyond
    `relative_max_distance`.
    """
    exact = config.relative_buckets // 2
    distances = torch.arange(config.max_model_len, dtype=torch.float64)
    octaves = torch.log(distances.clamp(min=1) / exact) / math.log(
        config.relative_max_distance / exact
    )
    wide = exact + (octaves * (config.relative_buckets - exact)).long()
    return torch.where(
        distances < exact, distances.long(), wide.clamp(max=config.relative_buckets - 1)
    )


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """How far before a query a key is: int64 [batch, sequence, n_keys] of positions [batch, sequence] and [n_keys].

    What comes after the query, which is masked, counts as 0.
    """
    return (query_positions[..., None] - key_positions).clamp(min=0)
