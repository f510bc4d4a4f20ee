"""The feed-forward sublayer: one for all tokens, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig

_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_clamped
_gelu_tanh = partial(functional.gelu, approximate="tanh")
# By name: the activation, and whether it is gated.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (functional.silu, True),
    "geglu": (functional.gelu, True),
    "geglu_tanh": (_gelu_tanh, True),
    "silu": (functional.silu, False),
    "gelu": (functional.gelu, False),
    "gelu_tanh": (_gelu_tanh, False),
    "relu": (functional.relu, False),
}


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x), gate and up in one matrix (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation, self.gated = _ACTIVATIONS[config.feed_forward]
        widened = 2 * config.d_ff if self.gated else config.d_ff
        self.up = nn.Linear(config.d_model, widened, bias=config.feed_forward_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_model] to the same shape, each token on its own."""
        hidden = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        lowered: Tensor = self.down(hidden)
        return lowered


class ExpertLinear(nn.Module):
    """The matrices [n_experts, n_out, n_in], and biases, of one linear layer of all experts."""

    def __init__(self, n_experts: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_experts, n_out)) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Apply one expert's matrix to x [tokens, n_in]."""
        bias = None if self.bias is None else self.bias[expert]
        return functional.linear(x, self.weight[expert], bias)


class Mixture(nn.Module):
    """The sum of the experts that a router chooses for each token, by their shares.

    Shazeer et al. 2017. Of the rows of `expert_up` the even ones make the gate and the odd ones
    what it gates, as ONNX Runtime's operator wants them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        n_experts, width = config.n_experts, config.d_expert
        assert n_experts is not None
        assert width is not None
        self.n_chosen = config.n_experts_per_token or 1
        self.normalized = config.normalize_expert_shares
        self.clamped = config.feed_forward == "swiglu_clamped"
        biased = config.feed_forward_bias
        self.router = nn.Linear(config.d_model, n_experts, bias=biased)
        self.expert_up = ExpertLinear(n_experts, config.d_model, 2 * width, biased)
        self.expert_down = ExpertLinear(n_experts, width, config.d_model, biased)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_model] to the same shape, each token on its own."""
        logits: Tensor = self.router(x)
        if self.normalized:
            scores, chosen = logits.topk(self.n_chosen)
            shares = scores.softmax(dim=-1)
        else:
            shares, chosen = logits.softmax(dim=-1).topk(self.n_chosen)
        exported = torch.onnx.is_in_onnx_export()
        rows = self._emit(x, chosen) if exported else self._compute(x, chosen)
        weighted = rows * shares[..., None]  # [..., n_chosen, d_model]
        # One after the other: how a reduction adds may depend on the place of a row in memory.
        return reduce(torch.add, weighted.chunk(self.n_chosen, dim=-2)).flatten(-2)

    def _compute(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return what each chosen expert [..., n_chosen] makes of its token."""
        rows = x.new_zeros(*chosen.shape, x.shape[-1])
        for expert in range(self.router.out_features):
            *token, place = (chosen == expert).nonzero(as_tuple=True)
            made = self.expert_down(self._activate(self.expert_up(x[tuple(token)], expert)), expert)
            rows[(*token, place)] = made.to(rows.dtype)
        return rows

    def _activate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden[..., ::2], hidden[..., 1::2]
        if not self.clamped:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return gate * (_ALPHA * gate).sigmoid() * (up + 1.0)

    def _emit(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Emit ONNX Runtime's MoE for the same, with one expert for each row of its input.

        Left to choose several, the operator would add them in an order that depends on the other
        tokens.
        """
        rows = x[..., None, :].expand(*chosen.shape, x.shape[-1]).flatten(0, -2)
        routes = (chosen.flatten()[:, None] == torch.arange(self.router.out_features)).to(x.dtype)
        attributes: dict[str, Any] = {
            "k": 1,
            "normalize_routing_weights": 1,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,  # gates and what they gate are interleaved
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
        }
        if self.clamped:
            attributes |= {"activation_alpha": _ALPHA, "activation_beta": 1.0}
            attributes["swiglu_limit"] = _LIMIT
        up, down = self.expert_up, self.expert_down
        made = torch.onnx.ops.symbolic(
            "com.microsoft::MoE",
            inputs=[rows, routes, up.weight, up.bias, down.weight, down.bias],
            attrs=attributes,
            dtype=x.dtype,
            shape=rows.shape,
            version=1,
        )
        return made.view(*chosen.shape, x.shape[-1])
