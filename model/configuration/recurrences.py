"""The kinds of recurrent layers, whose state is in the place of keys and values, or beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from kvasir.model.configuration.fields import ConfigError, Positive, Size, checked

# Sums of these over tokens are far from float32's -inf, whose product with 0 is not a number.
LEAST_LOG_DECAY = -1e9


@checked("recurrence")
class ShortConvolution:
    """Recurrent layers that mix a channel's last `kernel` tokens, between two gates (LFM2, 2025).

    bias: of the convolution and of both linear layers.
    """

    kind: Literal["short_convolution"] = "short_convolution"
    kernel: Annotated[Size, Field(ge=2)]
    bias: StrictBool = False


@checked("recurrence")
class DeltaRule:
    """Recurrent layers of the gated delta rule (Yang et al., "Gated Delta Networks", 2024).

    A convolution over `kernel` tokens makes queries, keys and values, of which n_key_head heads of
    key_dim channels each serve as many of the n_head heads of value_dim channels. doubled_rates:
    what a token replaces of a key's value is up to twice the difference. norm_eps: of its outputs'
    norm; None is the model's. output_gate: outputs are multiplied by this function of a gate.

    decays_by_channel: each channel of a head's keys has a decay of its own, and not the head (Kimi
    Linear, 2025). least_log_decay: no decay's logarithm is less; None is no limit. rank: decays and
    gates are made of so many numbers each; None makes both of a token's input.
    """

    kind: Literal["delta_rule"] = "delta_rule"
    kernel: Annotated[Size, Field(ge=2)]
    n_head: Size
    n_key_head: Size
    key_dim: Size
    value_dim: Size
    doubled_rates: StrictBool = False
    norm_eps: Positive | None = None
    output_gate: Literal["silu", "sigmoid"] = "silu"
    decays_by_channel: StrictBool = False
    least_log_decay: Annotated[float, Field(strict=True, ge=LEAST_LOG_DECAY, lt=0.0)] | None = None
    rank: Size | None = None

    def __post_init__(self) -> None:
        if self.n_head % self.n_key_head:
            wanted = f"a multiple of its n_key_head, {self.n_key_head}"
            raise ConfigError(f"recurrence.n_head must be {wanted}, not {self.n_head}")

    @property
    def widths(self) -> tuple[int, int, int]:
        """The channels of queries, keys and values."""
        of_keys = self.n_key_head * self.key_dim
        return of_keys, of_keys, self.n_head * self.value_dim

    @property
    def n_decays(self) -> int:
        """The number of a token's decays."""
        return self.n_head * (self.key_dim if self.decays_by_channel else 1)

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The numbers made of a token: for the convolution, gates, each head's rate, and decays."""
        gates, decays = self.rank or self.widths[2], self.rank or self.n_decays
        return sum(self.widths), gates, self.n_head, decays


@checked("recurrence")
class Mamba2:
    """Recurrent layers of Mamba-2 (Dao & Gu, "Transformers are SSMs", 2024).

    A convolution over `kernel` tokens makes n_head values of head_dim channels, and keys and
    queries of d_state channels, which the heads of each of n_group groups share; their outputs are
    normalised together, if they are `normed`. bias: of both linear layers. least_step: no token's
    step is less (Nemotron-H, 2025).
    """

    kind: Literal["mamba2"] = "mamba2"
    kernel: Annotated[Size, Field(ge=2)]
    n_head: Size
    head_dim: Size
    d_state: Size
    n_group: Size = 1
    bias: StrictBool = False
    convolution_bias: StrictBool = True
    least_step: Positive | None = None
    normed: StrictBool = True

    def __post_init__(self) -> None:
        if self.n_head % self.n_group:
            wanted = f"a multiple of its n_group, {self.n_group}"
            raise ConfigError(f"recurrence.n_head must be {wanted}, not {self.n_head}")

    @property
    def widths(self) -> tuple[int, int, int]:
        """The channels of values, keys and queries."""
        of_keys = self.n_group * self.d_state
        return self.n_head * self.head_dim, of_keys, of_keys


@checked("recurrence")
class Mamba:
    """Recurrent layers of Mamba's first version (Gu & Dao, "Mamba", 2023).

    A convolution over `kernel` tokens makes d_inner channels, each of which keeps d_state numbers.
    What it makes of a token makes a key and a query of d_state numbers, which all channels share,
    and step_rank numbers, which make each channel's step. inner_norm_eps: of the norms of these
    three (Jamba, 2024); None is without them. bias: of the first and the last linear layer.
    """

    kind: Literal["mamba"] = "mamba"
    kernel: Annotated[Size, Field(ge=2)]
    d_inner: Annotated[Size, Field(ge=2)]
    d_state: Size
    step_rank: Size
    inner_norm_eps: Positive | None = None
    bias: StrictBool = False
    convolution_bias: StrictBool = True


@checked("recurrence")
class Lstm:
    """Recurrent layers of `width` cells of long short-term memory (Hochreiter & Schmidhuber 1997).

    Those of an encoder read from right to left, as sources were turned round (Sutskever et al.
    2014), or with both_ways in either direction, `width` cells each (Bahdanau et al. 2015).
    """

    kind: Literal["lstm"] = "lstm"
    width: Size
    both_ways: StrictBool = False


_Kind = ShortConvolution | DeltaRule | Mamba | Mamba2 | Lstm
Recurrence = Annotated[_Kind, Field(discriminator="kind")]


def states_of(recurrence: _Kind, d_model: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each part of a layer's state, by name."""
    match recurrence:
        case ShortConvolution():
            return {"convolution": (recurrence.kernel - 1, d_model)}
        case Lstm():
            return {"hidden": (recurrence.width,), "cell": (recurrence.width,)}
        case Mamba():
            channels = recurrence.d_inner, recurrence.d_state, 1
            convolution = recurrence.kernel - 1, recurrence.d_inner
            return {"convolution": convolution, "channels": channels}
        case DeltaRule():
            values = recurrence.n_head, recurrence.key_dim, recurrence.value_dim
        case Mamba2():
            values = recurrence.n_head, recurrence.d_state, recurrence.head_dim
    convolution = recurrence.kernel - 1, sum(recurrence.widths)
    return {"convolution": convolution, "values": values}


def least_weights_of(recurrence: _Kind, d_model: int) -> int:
    """Return how many weights a layer has at least, which are almost all of them."""
    match recurrence:
        case ShortConvolution():
            return d_model * (4 * d_model + recurrence.kernel)
        case Lstm():
            each = 4 * (d_model + recurrence.width + 2) + d_model
            return (1 + recurrence.both_ways) * recurrence.width * each
        case Mamba():
            each = 3 * d_model + recurrence.kernel + 2 * recurrence.step_rank
            return recurrence.d_inner * (each + 3 * recurrence.d_state)
        case DeltaRule():
            n_values, n_read = recurrence.widths[2], sum(recurrence.parts)
            up = (recurrence.rank or 0) * (n_values + recurrence.n_decays)
        case Mamba2():
            n_values, up = recurrence.widths[0], 0
            n_read = n_values + sum(recurrence.widths) + recurrence.n_head
    return d_model * (n_read + n_values) + recurrence.kernel * sum(recurrence.widths) + up
