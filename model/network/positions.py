"""Positions: rotary angles and their scalings, sinusoids, and biases on scores by distance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.parts import RopeScaling


class RotaryTable(NamedTuple):
    """cos and sin of position · frequency, each [n_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class Positions(NamedTuple):
    """The tensors by which attention tells positions apart.

    rotary: angles to turn queries and keys by; rotary_in_windows: those of layers with a sliding
    window, where they have their own. bias: [batch or 1, n_head, sequence, n_keys], on scores.
    query_scale: [..., sequence], factors of queries. of_tokens: the angles of each token, [...,
    sequence, head_dim / 2], where attention's operator does not turn heads. lengths: [batch], the
    tokens of each row, after which it is padded; None is no padding.
    """

    rotary: RotaryTable | None = None
    bias: Tensor | None = None
    rotary_in_windows: RotaryTable | None = None
    query_scale: Tensor | None = None
    of_tokens: RotaryTable | None = None
    lengths: Tensor | None = None


def rotary_table(config: TransformerConfig, *, in_windows: bool = False) -> RotaryTable:
    """Return angles p · θ^(-2i/d) for every position p and pair i, scaled as the model wants.

    Su et al. 2021, section 3.2.2. The pairs beyond `rotary_dim` do not turn, and with latents are
    left out. in_windows: those by `sliding_window_rope_theta`.
    """
    rotary_dim = config.rotary_dim or config.head_dim
    n_still = 0 if config.latents else (config.head_dim - rotary_dim) // 2
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if in_windows:
        theta, scaling = config.sliding_window_rope_theta or theta, None
    frequencies = theta**-pairs
    amplitude = 1.0
    if scaling and scaling.kind == "longrope":
        beyond = config.max_model_len > (scaling.original_max_model_len or 0)
        factors = scaling.long_factors if beyond else scaling.short_factors
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64)
        amplitude = scaling.attention_factor or 1.0
    elif scaling:
        frequencies = _scale_frequencies(frequencies, scaling, theta)
        if scaling.kind == "yarn":
            amplitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), frequencies)
    still = config.max_model_len, n_still
    cos = torch.cat((angles.cos() * amplitude, torch.ones(still)), dim=1)
    sin = torch.cat((angles.sin() * amplitude, torch.zeros(still)), dim=1)
    return RotaryTable(cos.float(), sin.float())


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale frequencies [rotary_dim / 2], in radians a position."""
    stretched = frequencies / scaling.factor
    context, rotary_dim = scaling.original_max_model_len, 2 * len(frequencies)
    if scaling.kind == "linear" or context is None:
        return stretched
    if scaling.kind == "llama3":  # Llama 3.1's reference code: apply_scaling
        turns = context * frequencies / (2 * math.pi)  # in the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:  # Peng et al. 2023, section 3.2; blended by pair as in their code, not by turns
        # The pair, as a real number, that turns so often: θ^(2i/d) = context / (2π · turns).
        low, high = (
            rotary_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        blend = (torch.arange(len(frequencies)) - low) / max(high - low, 0.001)
        kept = 1.0 - blend.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * stretched


def query_scale_table(config: TransformerConfig) -> Tensor | None:
    """Return the factor of queries at each position [max_model_len]; None where all are 1."""
    scaling = config.rope_scaling
    if scaling is None or scaling.query_growth is None or scaling.original_max_model_len is None:
        return None
    if config.max_model_len <= scaling.original_max_model_len:
        return None
    steps = torch.arange(config.max_model_len) // scaling.original_max_model_len
    return 1.0 + scaling.query_growth * torch.log1p(steps.float())


def rotate(x: Tensor, table: RotaryTable, position_ids: Tensor) -> Tensor:
    """Turn pairs (i, i + d/2) of x [batch, heads, sequence, head_dim] by [batch, sequence]."""
    cos, sin = (part[position_ids][:, None] for part in table)
    return turn(x, RotaryTable(cos, sin))  # of [batch, 1, sequence, head_dim / 2]


def turn(x: Tensor, angles: RotaryTable) -> Tensor:
    """Turn pairs (i, i + d/2) of x [..., d] by angles that broadcast to [..., d / 2]."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def sinusoidal_table(config: TransformerConfig) -> Tensor:
    """Return sin and cos of p / 10000^(2i/d), interleaved: [max_model_len, d_model].

    Vaswani et al. 2017, section 3.5.
    """
    pairs = torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), 10000.0**-pairs)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : config.d_model].float()


def alibi_table(config: TransformerConfig) -> Tensor:
    """Return each head's bias for each distance to the key: [n_head, max_model_len].

    Slopes are 2^(-8i/n) for heads i = 1 … n (Press et al. 2022). Where n is no power of 2: those of
    the lower power of 2, then every other one of the next.
    """
    lower = 2 ** int(math.log2(config.n_head))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    slopes += [2 ** (-4 * i / lower) for i in range(1, 2 * (config.n_head - lower), 2)]
    return -torch.outer(torch.tensor(slopes), torch.arange(config.max_model_len).float())


def relative_buckets(config: TransformerConfig) -> Tensor:
    """Return the bucket of each distance to an earlier key: int64 [max_model_len].

    Raffel et al. 2020, section 2.1. The first half of the buckets are single distances; the others
    widen logarithmically, the last to all beyond `relative_max_distance`. Those of an encoder are
    half of all; the other half are of later keys.
    """
    count = config.relative_buckets // (1 if config.causal else 2)
    exact, last = count // 2, count - 1
    distances = torch.arange(config.max_model_len, dtype=torch.float64)
    octaves = torch.log(distances.clamp(min=1) / exact)
    octaves = octaves / math.log(config.relative_max_distance / exact)
    wide = exact + (octaves * (count - exact)).long()
    return torch.where(distances < exact, distances.long(), wide.clamp(max=last))


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return int64 [batch, sequence, n_keys]: how far keys are before queries, later ones < 0."""
    return query_positions[..., None] - key_positions
