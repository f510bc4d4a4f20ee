"""Mamba-2 (Dao & Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Mamba2
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


class Mamba2Mixer(Mixer):
    """Heads that each keep a matrix [d_state, head_dim].

    A token of step d decays it, and adds its value under its key: S = exp(-d a) S + k ⊗ d v. The
    output is q S + D v, times SiLU of a gate, and then, perhaps, normalised in groups.
    """

    def __init__(self, config: TransformerConfig, recurrence: Mamba2) -> None:
        super().__init__(config)
        self.recurrence, self.eps = recurrence, config.norm_eps
        n_head, bias = recurrence.n_head, recurrence.bias
        n_values, convolved = recurrence.widths[0], sum(recurrence.widths)
        self.parts = (n_values, convolved, n_head)  # the gate, what is convolved, and the steps
        self.input = nn.Linear(config.d_model, sum(self.parts), bias=bias)
        self.convolution = CausalConvolution(
            convolved, recurrence.kernel, bias=recurrence.convolution_bias, activates=True
        )
        self.log_decay = nn.Parameter(torch.arange(1.0, n_head + 1.0).log())
        self.step_bias = nn.Parameter(first_biases(n_head))
        self.skip = nn.Parameter(torch.ones(n_head))
        self.norm = nn.RMSNorm(n_values, config.norm_eps) if recurrence.normed else None
        self.output = nn.Linear(n_values, config.d_model, bias=bias)

    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """See Mixer."""
        recurrence, (past, matrices) = self.recurrence, state
        gate, convolved, step = self.input(x).split(self.parts, dim=-1)
        convolved, past = self.convolution(convolved, past, n_new)
        value, key, query = convolved.split(recurrence.widths, dim=-1)
        # Without a step a matrix neither decays nor takes anything.
        step = -minus_softplus(step + self.step_bias)
        if recurrence.least_step is not None:
            step = step.clamp(min=recurrence.least_step)
        step = torch.where(moving(x, n_new), step, 0.0)
        heads = value.unflatten(-1, (recurrence.n_head, -1))
        taken = (heads * step[..., None]).flatten(-2)
        shared = recurrence.n_head // recurrence.n_group
        query, key = (repeat_heads(part, shared, recurrence.d_state) for part in (query, key))
        read, matrices = remember((query, key, taken), matrices, -self.log_decay.exp() * step)
        read = read + (heads * self.skip[:, None]).flatten(-2)
        output: Tensor = self.output(self._normed(read * functional.silu(gate)))
        return output, (past, matrices)

    def _normed(self, x: Tensor) -> Tensor:
        """Normalise x [..., n_head · head_dim] in its groups, if there is a norm."""
        if self.norm is None:
            return x
        groups = x.unflatten(-1, (self.recurrence.n_group, -1))
        ones = torch.ones(groups.shape[-1], dtype=x.dtype, device=x.device)
        normed = functional.rms_norm(groups, ones.shape, ones, self.eps).flatten(-2)
        return normed * self.norm.weight
