"""Sums over the logits of many tokens, of which a part exists at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Returns what is summed of logits [tokens, vocab] and their targets [tokens].
Measure = Callable[[Tensor, Tensor], Tensor]
_PART = 1024  # tokens: the gradient of the head's matrix is added once a part


class _Sum(torch.autograd.Function):
    """The sum, whose gradients are made with it, while each part's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        project: Callable[[Tensor], Tensor],
        measure: Measure,
        targets: Tensor,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        values, of_hidden = list[Tensor](), torch.empty_like(hidden)
        of_parameters: list[Tensor] = []
        parts = (tensor.split(_PART) for tensor in (hidden, targets, of_hidden))
        for tokens, wanted, of_tokens in zip(*parts, strict=True):
            with torch.enable_grad():
                leaf = tokens.detach().requires_grad_()
                value = measure(project(leaf), wanted)
                gradient, *others = torch.autograd.grad(value, (leaf, *parameters))
            values.append(value.detach())
            of_tokens.copy_(gradient)
            for so_far, other in zip(of_parameters, others, strict=bool(of_parameters)):
                so_far.add_(other)
            of_parameters = of_parameters or others
        ctx.save_for_backward(of_hidden, *of_parameters)
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        made: tuple[Tensor, ...] = ctx.saved_tensors
        return (None, None, None, *(gradient.mul_(outer[0]) for gradient in made))


def summed(
    project: Callable[[Tensor], Tensor],
    measure: Measure,
    targets: Tensor,
    hidden: Tensor,
    parameters: list[Tensor],
) -> Tensor:
    """Return the sum of `measure` over all tokens, with gradients if it is a scalar.

    project: makes logits of hidden [tokens, d_model], with those of `parameters` that are trained.
    targets: [tokens].
    """
    if torch.is_grad_enabled():
        total: Tensor = _Sum.apply(  # type: ignore[no-untyped-call]
            project, measure, targets, hidden, *parameters
        )
        return total
    parts = zip(hidden.split(_PART), targets.split(_PART), strict=True)
    return torch.stack([measure(project(tokens), wanted) for tokens, wanted in parts]).sum(dim=0)
