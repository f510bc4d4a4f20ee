"""What recurrent sublayers have in common: a state of fixed size for each row.

A run moves a row's state by the first `n_new` of its tokens. Those after them are padding, and a
row without new tokens keeps its state to the bit. Stock operators on the CPU compute the same bits
for every way of cutting a row into runs, and whatever the other rows are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import RunInputs
from kvasir.model.network.cross_attention import Source
from kvasir.model.network.positions import Positions
from kvasir.model.network.recurrent.chunks import run_chunks
from kvasir.model.network.run_inputs import StepInputs

State = tuple[Tensor, ...]  # the parts of `TransformerConfig.states`, in order: [batch, …]


class Mixer(nn.Module, ABC):
    """A recurrent sublayer, of the configuration's recurrence.

    A matrix that reads the sublayer's input has a name that begins with `input`, and the one that
    makes its output is `output`: rounding goes by these names. In a graph a part of a state has one
    reader, on which the new one depends: both are the same memory.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.shapes = tuple(config.states.values())

    @abstractmethod
    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """Return the output for x [batch, sequence, d_model], and the state after it.

        n_new: int64 [batch], the tokens of each row that move its state. Outputs of the others have
        no meaning.
        """

    def forward(self, x: Tensor, positions: Positions, source: Source | None = None) -> Tensor:
        """Run whole sequences x [batch, sequence, d_model], each from an empty state."""
        del positions, source
        batch, sequence, _ = x.shape
        whole = torch.full((batch,), sequence, device=x.device)
        return self.mix(x, self.empty_state(x), whole)[0]

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, state: State
    ) -> tuple[Tensor, State]:
        """Run new tokens x [batch, sequence, d_model] from a state."""
        del positions  # the order of tokens is all that a state knows
        assert isinstance(inputs, StepInputs), "recurrent layers run over rows"
        assert inputs.n_new is not None, "a run over states says how many tokens are new"
        return self.mix(x, state, inputs.n_new)

    def empty_state(self, x: Tensor) -> State:
        """Return the state before the first token, for each row of x."""
        return tuple(x.new_zeros(x.shape[0], *shape) for shape in self.shapes)


def moving(x: Tensor, n_new: Tensor) -> Tensor:
    """Return bool [batch, sequence, 1]: the tokens of x [batch, sequence, …] that move a state."""
    place = torch.arange(x.shape[1], device=x.device)
    return (place < n_new[:, None])[..., None]


def minus_softplus(x: Tensor) -> Tensor:
    """Return -log(1 + exp(x)) as the softmax of two numbers, of which the other is 0.

    ONNX Runtime's Softplus gives a number other bits in another place among its neighbours.
    """
    return functional.pad(x[..., None], (1, 0)).log_softmax(dim=-1)[..., 0]


def repeat_heads(x: Tensor, times: int, width: int) -> Tensor:
    """Return each head of x [..., heads · width] as often as it is shared."""
    heads = x.unflatten(-1, (-1, 1, width))
    repeated: Tensor = heads.expand(*heads.shape[:-2], times, width).flatten(-3)
    return repeated


def remember(
    tokens: tuple[Tensor, Tensor, Tensor],
    past: Tensor,
    decay: Tensor,
    rate: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return what queries read of heads' matrices, times scale, and the matrices: see `run_chunks`.

    tokens: query, key and value. They and what is read are [batch, sequence, heads · …]. decay:
    [batch, sequence, heads] or, of each channel of keys, [batch, sequence, heads · d_k]. In a graph
    heads may share a query.
    """
    n_head, value = past.shape[1], tokens[2]
    if torch.onnx.is_in_onnx_export():
        rule = "gated" if rate is None else "gated_delta"
        n_query = tokens[0].shape[-1] // past.shape[2]
        heads = {"q_num_heads": n_query, "kv_num_heads": n_head}
        read, present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::LinearAttention",
            inputs=[*tokens, past, decay, *([] if rate is None else [rate])],
            attrs={**heads, "update_rule": rule, "scale": scale},
            dtypes=(value.dtype, past.dtype),
            shapes=(list(value.shape), list(past.shape)),
            version=1,
        )
        return read, present
    query, key, value = (part.unflatten(-1, (n_head, -1)) for part in tokens)
    if decay.shape[-1] != n_head:
        decay = decay.unflatten(-1, (n_head, -1))
    read, present = run_chunks(query * scale, key, value, past, decay, rate)
    return read.flatten(-2), present


def first_biases(n_head: int) -> Tensor:
    """Return biases [n_head] with which softplus is from 0.001 to 0.1, evenly in its logarithm.

    So heads begin with memories of few and of many tokens, as in Mamba (Gu & Dao, 2023).
    """
    return torch.logspace(-3, -1, n_head).expm1().log()


class CausalConvolution(nn.Module):
    """Each channel's weighted sum of its last `kernel` tokens, and SiLU of it if `activates`."""

    def __init__(self, n_channels: int, kernel: int, *, bias: bool, activates: bool) -> None:
        super().__init__()
        self.activates = activates
        self.weight = nn.Parameter(torch.empty(n_channels, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(n_channels)) if bias else None
        nn.init.normal_(self.weight, std=kernel**-0.5)

    def forward(self, x: Tensor, past: Tensor, n_new: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of x [batch, sequence, channels], and the last tokens [batch, kernel - 1, …].

        past: those before x; see `Mixer.mix` for n_new.
        """
        known = torch.cat((past, x), dim=1)
        places = n_new[:, None] + torch.arange(past.shape[1], device=x.device)
        present = known.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        if torch.onnx.is_in_onnx_export():
            activation = "silu" if self.activates else "none"
            before = known[:, : past.shape[1]]  # a copy: see Mixer
            sums, _ = torch.onnx.ops.symbolic_multi_out(
                "com.microsoft::CausalConvWithState",
                inputs=[x, self.weight, self.bias, before],
                attrs={"channels_last": 1, "activation": activation},
                dtypes=(x.dtype, x.dtype),
                shapes=(list(x.shape), list(past.shape)),
                version=1,
            )
            return sums, present
        channels_first = known.transpose(1, 2)
        sums = functional.conv1d(channels_first, self.weight, self.bias, groups=x.shape[-1])
        sums = sums.transpose(1, 2)
        return functional.silu(sums) if self.activates else sums, present
