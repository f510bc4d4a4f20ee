"""The feed-forward sublayer: one for all tokens, or a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig

_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_clamped
_BETA = 0.5  # of xielu
_NEAR = 0.02  # of sparse_mixer: twice the jitter in training
_LEAST_SUM = 1e-20  # of shares: all may vanish
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
    "relu2": (lambda x: functional.relu(x).square(), False),
}


class Xielu(nn.Module):
    """The integral of an ELU with two learned slopes (Huang & Schlag 2024).

    p x² + x / 2 where x > 0; else n (eˣ - 1 - x) + x / 2. p and n - 1/2 are softplus of what is
    learned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8))))
        self.alpha_n = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8 - _BETA))))

    def forward(self, x: Tensor) -> Tensor:
        """Map each number, in float32: CUDA compares and limits no numbers of 16 bits."""
        wide = x.float()
        above = functional.softplus(self.alpha_p.float()) * wide.square()
        slope = functional.softplus(self.alpha_n.float()) + _BETA
        below = slope * (wide.clamp(max=0.0).expm1() - wide)
        return (torch.where(wide > 0, above, below) + _BETA * wide).to(x.dtype)


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x), gate and up in one matrix (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.d_ff
        known = _ACTIVATIONS.get(config.feed_forward)
        self.activation: Callable[[Tensor], Tensor]
        self.activation, self.gated = (Xielu(), False) if known is None else known
        widened = 2 * width if self.gated else width
        self.up = nn.Linear(config.d_model, widened, bias=config.feed_forward_bias)
        self.down = nn.Linear(width, config.d_model, bias=config.feed_forward_bias)

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

    Shazeer et al. 2017. A shared expert is of every token (Dai et al. 2024). Of the rows of
    `expert_up` the even ones make the gate and the odd ones what it gates, as ONNX Runtime's
    operator wants them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        n_experts, width = config.n_experts, config.d_expert
        assert n_experts is not None
        assert width is not None
        self.config, self.n_chosen = config, config.n_experts_per_token or 1
        self.clamped = config.feed_forward == "swiglu_clamped"
        biased = config.feed_forward_bias
        self.router = nn.Linear(config.d_model, n_experts, bias=biased)
        self.choice_bias = nn.Parameter(torch.zeros(n_experts)) if config.choice_bias else None
        self.expert_up = ExpertLinear(n_experts, config.d_model, 2 * width, biased)
        self.expert_down = ExpertLinear(n_experts, width, config.d_model, biased)
        width, gated = config.d_shared_expert, config.shared_expert_gate
        self.shared = None if width is None else FeedForward(config, width)
        self.shared_gate = nn.Linear(config.d_model, 1, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_model] to the same shape, each token on its own."""
        # First, so that in the exported graph a layer's products stand before its experts.
        shared = None if self.shared is None else self.shared(x)
        shares, chosen = self._route(self.router(x))
        exported, scales_inputs = torch.onnx.is_in_onnx_export(), self.config.shares_scale_inputs
        rows = x[..., None, :].expand(*chosen.shape, x.shape[-1])  # [..., n_chosen, d_model]
        rows = rows * shares[..., None] if scales_inputs else rows
        rows = self._emit(rows, chosen) if exported else self._compute(rows, chosen)
        weighted = rows if scales_inputs else rows * shares[..., None]
        # One after the other: how a reduction adds may depend on the place of a row in memory.
        result: Tensor = reduce(torch.add, weighted.chunk(self.n_chosen, dim=-2)).flatten(-2)
        if shared is not None and self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        return result if shared is None else result + shared

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and numbers of the chosen experts, each [..., n_chosen]."""
        config, normalized = self.config, self.config.normalize_expert_shares
        if config.router == "sparse_mixer":
            return self._mix_sparsely(logits)
        plain = self.choice_bias is None and config.n_expert_groups is None
        if plain and config.router == "softmax" and normalized:
            best, chosen = logits.topk(self.n_chosen)
            return self._scaled(best.softmax(dim=-1)), chosen
        scores = logits.softmax(dim=-1) if config.router == "softmax" else logits.sigmoid()
        if plain:
            shares, chosen = scores.topk(self.n_chosen)
        else:
            wanted = logits if config.choice_bias == "logits" else scores
            if self.choice_bias is not None:
                wanted = wanted + self.choice_bias
            chosen = self._in_groups(wanted).topk(self.n_chosen)[1]
            shares = scores.gather(-1, chosen)
        if normalized:
            total = reduce(torch.add, shares.chunk(self.n_chosen, dim=-1))
            shares = shares / (total + _LEAST_SUM)
        return self._scaled(shares), chosen

    def _mix_sparsely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `_route` does: each share is among those left that are near the largest."""
        best, chosen = logits.topk(self.n_chosen)
        left, shares = logits, []
        for top, expert in zip(best.split(1, dim=-1), chosen.split(1, dim=-1), strict=True):
            far = (top - logits) / torch.maximum(logits.abs(), top) > _NEAR
            near = left.masked_fill(far, -torch.inf)
            shares.append(near.softmax(dim=-1).gather(-1, expert))
            taken = expert == torch.arange(logits.shape[-1], device=logits.device)
            left = left.masked_fill(taken, -torch.inf)
        return self._scaled(torch.cat(shares, dim=-1)), chosen

    def _scaled(self, shares: Tensor) -> Tensor:
        scale = self.config.expert_scale
        return shares if scale == 1.0 else shares * scale

    def _in_groups(self, wanted: Tensor) -> Tensor:
        """Return scores [..., n_experts] with -inf outside of a token's groups of experts."""
        n_groups, n_kept = self.config.n_expert_groups, self.config.n_groups_per_token
        if n_groups is None or n_groups == n_kept:
            return wanted
        grouped = wanted.unflatten(-1, (n_groups, -1))
        best = grouped.topk(self.config.n_best_of_group)[0].unbind(-1)
        kept = reduce(torch.add, best).topk(n_kept or 1)[1]  # [..., n_kept]
        mine = (kept[..., None, :] == torch.arange(n_groups, device=kept.device)[:, None]).any(
            dim=-1
        )
        within: Tensor = grouped.masked_fill(~mine[..., None], -torch.inf)
        return within.flatten(-2)

    def _compute(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return what each chosen expert [..., n_chosen] makes of its row x [..., n_chosen, d]."""
        rows = torch.zeros_like(x)
        for expert in range(self.router.out_features):
            mine = (chosen == expert).nonzero(as_tuple=True)
            made = self.expert_down(self._activate(self.expert_up(x[mine], expert)), expert)
            rows[mine] = made.to(rows.dtype)
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
        rows = x.flatten(0, -2)
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
        return made.view(x.shape)
