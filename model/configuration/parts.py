"""Parts of a configuration that are objects of their own: rotary scalings, latents, projections."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictBool

from kvasir.model.configuration.fields import ConfigError, Positive, Size, Turns, checked

Position = Literal[
    "rotary", "learned", "sinusoidal", "alibi", "relative", "learned_relative", "none"
]
FeedForward = Literal[
    "swiglu",
    "geglu",
    "geglu_tanh",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "xielu",
    "swiglu_clamped",
]
Activation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh"]


@checked("rope_scaling")
class RopeScaling:
    """A way to stretch rotary frequencies to more positions than a model was first trained on.

    kind: "linear" divides positions by `factor` (Chen et al. 2023); "llama3" divides low
    frequencies, and blends between two wavelengths (Llama 3.1); "yarn" divides the pairs that turn
    less than `beta_slow` times in `original_max_model_len` positions, keeps those that turn more
    than `beta_fast` times, and blends between (Peng et al. 2023). truncate: yarn rounds the pairs
    between which it blends outwards to whole ones. "longrope" divides each pair by its own number,
    of `short_factors` while max_model_len is at most `original_max_model_len` and of `long_factors`
    beyond (Ding et al. 2024). yarn and longrope multiply cos and sin by `attention_factor`; None is
    0.1 ln(factor) + 1 for yarn, and 1 for longrope.

    query_growth: queries at position p are multiplied by
    1 + query_growth · ln(1 + ⌊p / original_max_model_len⌋) (Llama 4, 2025).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: Positive
    original_max_model_len: Size | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Turns = 32.0
    beta_slow: Turns = 1.0
    attention_factor: Positive | None = None
    truncate: StrictBool = True
    short_factors: tuple[Positive, ...] = ()
    long_factors: tuple[Positive, ...] = ()
    query_growth: Positive | None = None

    def __post_init__(self) -> None:
        if self.kind != "linear" and self.original_max_model_len is None:
            raise ConfigError(
                f"rope_scaling {self.kind} needs original_max_model_len, a positive whole number"
            )
        if self.query_growth is not None and self.original_max_model_len is None:
            raise ConfigError("rope_scaling.query_growth needs original_max_model_len")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling.low_freq_factor ({self.low_freq_factor}) must be less than its "
                f"high_freq_factor ({self.high_freq_factor})"
            )


@checked("latents")
class Latents:
    """The vector of a token that the keys and values of all heads are made of (DeepSeek-V2, 2024).

    rank: numbers of the latent, of which a head makes key_dim channels of a key, that are not
    turned, and value_dim of a value. query_rank: queries are made of a latent of their own, of so
    many numbers; None is none.
    """

    rank: Size
    key_dim: Size
    value_dim: Size
    query_rank: Size | None = None


@checked("projections")
class Projection:
    """A linear layer to `d_out` numbers, then an activation, and with `norm` a norm."""

    d_out: Size
    activation: Activation = "identity"
    bias: StrictBool = True
    norm: StrictBool = False
