"""Mamba's first version (Gu & Dao, "Mamba: Linear-Time Sequence Modeling", 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Mamba
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

_CHUNK = 32  # tokens


class MambaMixer(Mixer):
    """Channels that each keep d_state numbers.

    A token of step d decays a channel's numbers, each at a rate of its own, and adds its value
    times its key: S = exp(-d a) S + d v k. The output is q · S + D v, times SiLU of a gate.
    """

    def __init__(self, config: TransformerConfig, recurrence: Mamba) -> None:
        super().__init__(config)
        width, d_state, eps = recurrence.d_inner, recurrence.d_state, recurrence.inner_norm_eps
        self.width, self.parts = width, (recurrence.step_rank, d_state, d_state)
        self.input = nn.Linear(config.d_model, 2 * width, bias=recurrence.bias)
        self.convolution = CausalConvolution(
            width, recurrence.kernel, bias=recurrence.convolution_bias, activates=True
        )
        self.selection = nn.Linear(width, sum(self.parts), bias=False)
        norms = [nn.Identity() if eps is None else nn.RMSNorm(n, eps) for n in self.parts]
        self.step_norm, self.key_norm, self.query_norm = norms
        self.step_up = nn.Linear(recurrence.step_rank, width, bias=False)
        self.step_bias = nn.Parameter(first_biases(width))
        self.log_decay = nn.Parameter(torch.arange(1.0, d_state + 1.0).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.output = nn.Linear(width, config.d_model, bias=recurrence.bias)

    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """See Mixer."""
        past, channels = state
        value, gate = self.input(x).split((self.width, self.width), dim=-1)
        value, past = self.convolution(value, past, n_new)
        selected = self.selection(value).to(self.log_decay.dtype)  # after a product in 16 bits
        step, key, query = selected.split(self.parts, dim=-1)
        key, query = self.key_norm(key), self.query_norm(query)
        # A step of 0 neither decays nor adds anything.
        step = -minus_softplus(self.step_up(self.step_norm(step)) + self.step_bias)
        step = torch.where(moving(x, n_new), step, 0.0)
        taken, rates = step * value, -self.log_decay.exp()
        if torch.onnx.is_in_onnx_export():  # each channel is a head, whose matrix has one column
            keys = repeat_heads(key, self.width, key.shape[-1])
            decay = (step[..., None] * rates).flatten(-2)
            read, channels = remember((query, keys, taken), channels, decay)
        else:
            read, numbers = scan(query, key, taken, channels[..., 0], step, rates)
            channels = numbers[..., None]
        output: Tensor = self.output((read + self.skip * value) * functional.silu(gate))
        return output, (past, channels)


def scan(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, step: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what queries read [batch, sequence, channels], and the numbers after all tokens.

    A token decays the numbers of each channel, S = exp(step · rates) S, and adds its value times
    its key; it then reads q · S. query, key: [batch, sequence, d_state]. value, step: [batch,
    sequence, channels]. past: [batch, channels, d_state]. rates: [channels, d_state].

    The numbers after all tokens of a chunk are there at once; gradients compute them again.
    """

    def scan_chunk(*given: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, step, past = given
        # By the last 1, 2, 4, … tokens: what is left of the numbers before them, and what they add.
        left = (step[..., None] * rates).exp()  # [batch, sequence, channels, d_state]
        added = value[..., None] * key[..., None, :]
        added = torch.cat((added[:, :1] + left[:, :1] * past[:, None], added[:, 1:]), dim=1)
        n = 1
        while n < added.shape[1]:
            added = torch.cat((added[:, :n], added[:, n:] + left[:, n:] * added[:, :-n]), dim=1)
            left = torch.cat((left[:, :n], left[:, n:] * left[:, :-n]), dim=1)
            n *= 2
        return (added * query[..., None, :]).sum(dim=-1), added[:, -1]

    reads = []
    for chunk in zip(*(x.split(_CHUNK, dim=1) for x in (query, key, value, step)), strict=True):
        read, past = checkpoint(scan_chunk, *chunk, past, use_reentrant=False)
        reads.append(read)
    return torch.cat(reads, dim=1), past
