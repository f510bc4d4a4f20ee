"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import DeltaRule
from kvasir.model.network.recurrent.mixer import (
    CausalConvolution,
    Mixer,
    State,
    first_biases,
    minus_softplus,
    moving,
    remember,
    repeat_heads,
)

_EPS = 1e-6  # added to the squared length of queries and keys


class DeltaRuleMixer(Mixer):
    """Heads that each keep a matrix from keys to values.

    A token decays the matrix, or each of its rows, and replaces a share of what it has under the
    token's key by the token's value: S = exp(g) S, then S += k ⊗ β (v - k S); the output is q S.
    Queries and keys have length 1. Outputs are normalised a head, and multiplied by a gate.
    """

    def __init__(self, config: TransformerConfig, recurrence: DeltaRule) -> None:
        super().__init__(config)
        self.recurrence = recurrence
        n_head, n_values, n_decays = recurrence.n_head, recurrence.widths[2], recurrence.n_decays
        self.input = nn.Linear(config.d_model, sum(recurrence.parts), bias=False)
        self.gate: nn.Module = nn.Identity()
        self.decay: nn.Module = nn.Identity()
        if (rank := recurrence.rank) is not None:
            self.gate = nn.Linear(rank, n_values, bias=False)
            self.decay = nn.Linear(rank, n_decays, bias=False)
        width, kernel = sum(recurrence.widths), recurrence.kernel
        self.convolution = CausalConvolution(width, kernel, bias=False, activates=True)
        self.log_decay = nn.Parameter(torch.linspace(1.0, 16.0, n_head).log())
        self.decay_bias = nn.Parameter(first_biases(n_decays))
        self.norm = nn.RMSNorm(recurrence.value_dim, recurrence.norm_eps or config.norm_eps)
        self.output = nn.Linear(n_values, config.d_model, bias=False)

    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """See Mixer."""
        rule, (past, values) = self.recurrence, state
        qkv, gate, rate, decay = self.input(x).split(rule.parts, dim=-1)
        convolved, past = self.convolution(qkv, past, n_new)
        query, key, value = convolved.split(rule.widths, dim=-1)
        query, key = (_length_one(part, rule.key_dim) for part in (query, key))
        shared = rule.n_head // rule.n_key_head
        if shared > 1:
            query, key = (repeat_heads(part, shared, rule.key_dim) for part in (query, key))
        moves = moving(x, n_new)
        rate = rate.sigmoid() * (2.0 if rule.doubled_rates else 1.0)
        rate = torch.where(moves, rate, 0.0)
        decay = torch.where(moves, self._log_decays(self.decay(decay)), 0.0)
        scale = rule.key_dim**-0.5
        read, values = remember((query, key, value), values, decay, rate, scale)
        heads = self.norm(read.unflatten(-1, (rule.n_head, rule.value_dim)))
        gate = self.gate(gate)
        gate = functional.silu(gate) if rule.output_gate == "silu" else gate.sigmoid()
        output: Tensor = self.output(heads.flatten(-2) * gate)
        return output, (past, values)

    def _log_decays(self, x: Tensor) -> Tensor:
        """Return the logarithms of decays of x [..., n_decays], which are less than 0."""
        rule, speed = self.recurrence, self.log_decay.exp()
        if rule.decays_by_channel:
            speed = speed[:, None].expand(-1, rule.key_dim).flatten()
        if rule.least_log_decay is None:
            return speed * minus_softplus(x + self.decay_bias)
        return rule.least_log_decay * (speed * (x + self.decay_bias)).sigmoid()


def _length_one(x: Tensor, width: int) -> Tensor:
    """Return the heads of x [..., heads · width] with length 1, but for _EPS."""
    weight = torch.full((width,), width**-0.5, dtype=x.dtype, device=x.device)
    heads = functional.rms_norm(x.unflatten(-1, (-1, width)), (width,), weight, _EPS / width)
    normed: Tensor = heads.flatten(-2)
    return normed
