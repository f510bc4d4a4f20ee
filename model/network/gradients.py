"""Functions that make their gradients themselves, in less memory or time than PyTorch would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Returns what is summed of logits [tokens, vocab] and their targets [tokens].
Measure = Callable[[Tensor, Tensor], Tensor]
_BLOCKS = 4  # of queries, each of which sees the keys up to its own
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


class _CausalAttention(torch.autograd.Function):
    """Attention whose probabilities are computed again for the gradients (Dao et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        made = [
            _probabilities(query[..., start:end, :], key[..., :end, :], scale).to(value.dtype)
            @ value[..., :end, :]
            for start, end in _blocks(query.shape[-2])
        ]
        attended = torch.cat(made, dim=-2)
        ctx.save_for_backward(query, key, value, attended)
        ctx.scale = scale
        return attended

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended = ctx.saved_tensors
        (of_attended,) = outer
        n_tokens, scale = query.shape[-2], ctx.scale
        # Of a row of probabilities: their sum, weighted by their gradients.
        means = (of_attended.float() * attended.float()).sum(dim=-1, keepdim=True)
        of_query: list[Tensor] = []
        of_key: list[Tensor] = []
        of_value: list[Tensor] = []
        for start, end in _blocks(n_tokens):
            queries, wanted = query[..., start:end, :], of_attended[..., start:end, :]
            keys, rest = key[..., :end, :], (0, 0, 0, n_tokens - end)
            weights = _probabilities(queries, keys, scale)
            of_weights = wanted.float() @ value[..., :end, :].float().transpose(-1, -2)
            of_scores = (weights * (of_weights - means[..., start:end, :]) * scale).to(query.dtype)
            of_query.append(of_scores @ keys)
            of_key.append(functional.pad(of_scores.transpose(-1, -2) @ queries, rest))
            rounded = weights.to(query.dtype)
            of_value.append(functional.pad(rounded.transpose(-1, -2) @ wanted, rest))
        return (
            torch.cat(of_query, dim=-2),
            sum(of_key[1:], of_key[0]),
            sum(of_value[1:], of_value[0]),
            None,
        )


def _blocks(n_tokens: int) -> list[tuple[int, int]]:
    size = -(-n_tokens // _BLOCKS)
    return [(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size)]


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return those of the last tokens over all, float32 [..., queries, keys]."""
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    place = torch.arange(n_keys, device=key.device)
    with torch.autocast(query.device.type, enabled=False):  # of 16 bits a score has 8
        scores = query.float() @ key.float().transpose(-1, -2) * scale
    hidden = place > place[n_keys - n_queries :, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute causal attention, fast only where it is compiled.

    query, key, value: [batch, n_head, sequence, head_dim]. Scores and their gradients are float32.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return attended
