"""The places of a decoder's parameters in a published checkpoint, and their conversion.

A `Source` gives the shapes that the file must hold for a parameter of ours, so that headers alone
decide about a whole checkpoint, and makes the parameter from the tensors of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvasir.model.config import TransformerConfig
from kvasir.model.tensor_files import Shape


@dataclass(frozen=True, slots=True)
class Source:
    """The modules of a file that hold one module of ours; `*` in their names is the layer.

    `#` is each expert in turn. "a|b" is b where there is no a: one norm for both sublayers of a
    parallel residual.
    """

    modules: tuple[str, ...]
    # Returns the shapes in the file for our shape.
    shapes: Callable[[Shape, TransformerConfig], list[Shape]] = lambda shape, _: [shape]
    # Makes our tensor, or one that broadcasts to it, from those in the file.
    join: Callable[[list[Tensor], TransformerConfig], Tensor] = lambda tensors, _: tensors[0]
    in_float32: bool = False  # the result is float32 whatever the file's type
    zeros_if_absent: bool = False  # of a bias
    weight_plus: float = 0.0  # added to a weight, and to no bias
    # In place of join, with one tensor in memory: returns the part of ours that the i-th becomes.
    part: Callable[[Tensor, int], Tensor] | None = None

    def names(self, config: TransformerConfig) -> list[str]:
        """Return the modules; with experts, all of one before the next."""
        if not any("#" in module for module in self.modules):
            return list(self.modules)
        experts = range(config.n_experts or 0)
        return [module.replace("#", str(expert)) for expert in experts for module in self.modules]


_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}  # TensorFlow's too


def module_and_kind(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and "weight" or "bias".

    A parameter that is neither is a module of its own.
    """
    module, _, kind = name.rpartition(".")
    if kind in _KINDS:
        return module, _KINDS[kind]
    return name, "bias" if name.endswith("bias") else "weight"


_PARENTS = {  # our modules of a layer that are within another one
    **dict.fromkeys(("qkv", "output", "query_norm", "key_norm", "clip", "sinks"), "attention."),
    **dict.fromkeys(("query_latent", "query_latent_norm", "gate"), "attention."),
    **dict.fromkeys(("latent", "latent_norm", "key_up", "value_up"), "attention."),
    **dict.fromkeys(("up", "down", "router", "expert_up", "expert_down"), "feed_forward."),
    **dict.fromkeys(("choice_bias", "shared_gate"), "feed_forward."),
    **dict.fromkeys(("shared.up", "shared.down"), "feed_forward."),
    **dict.fromkeys(("activation.alpha_p", "activation.alpha_n"), "feed_forward."),
    **dict.fromkeys(("query", "key_value"), "cross_attention."),
}


def in_layers(prefix: str, **places: str | Source) -> dict[str, str | Source]:
    """Return the places of our modules of a layer, which are named by their last part.

    prefix: of the file's modules of that layer, which it holds under `*`.
    """
    placed: dict[str, str | Source] = {}
    for name, place in places.items():
        source = Source((place,)) if isinstance(place, str) else place
        modules = tuple(
            "|".join(prefix + choice for choice in module.split("|")) for module in source.modules
        )
        placed[f"blocks.*.{_PARENTS.get(name, '')}{name}"] = replace(source, modules=modules)
    return placed


def transposed(module: str) -> Source:
    """Return the source of a linear layer whose weight is [in, out]; its bias is as ours."""
    return Source((module,), lambda shape, _: [shape[::-1]], lambda tensors, _: tensors[0].t())


def stacked(*modules: str) -> Source:
    """Return the source of queries, keys and values, or of a gate and what it gates."""

    def shapes(shape: Shape, config: TransformerConfig) -> list[Shape]:
        rows = [shape[0] // len(modules)] * len(modules)
        if len(modules) == 3:
            heads = (config.n_head, config.n_kv_head, config.n_kv_head)
            rows = [n * config.head_dim for n in heads]
        return [(n, *shape[1:]) for n in rows]

    return Source(modules, shapes, lambda tensors, _: torch.cat(tensors))


def of_experts(*modules: str) -> Source:
    """Return the source of all experts' matrices, each alone in the file.

    Rows of a gate and of what it gates alternate.
    """
    n = len(modules)

    def shapes(shape: Shape, _: TransformerConfig) -> list[Shape]:
        return [(shape[1] // n, *shape[2:])] * (shape[0] * n)

    return Source(modules, shapes, part=lambda made, i: made[i // n, i % n :: n])


def in_halves(module: str) -> Source:
    """Return the source of experts' matrices [experts, out, in] of gates before what they gate."""

    def join(tensors: list[Tensor], _: TransformerConfig) -> Tensor:
        gates, gated = tensors[0].chunk(2, dim=1)
        return torch.stack((gates, gated), dim=2).flatten(1, 2)

    return Source((module,), join=join)


def of_gates(gates: str, gated: str) -> Source:
    """Return the source of experts' matrices [experts, out, in] of gates, and of what they gate."""

    def shapes(shape: Shape, _: TransformerConfig) -> list[Shape]:
        return [(shape[0], shape[1] // 2, *shape[2:])] * 2

    return Source((gates, gated), shapes, part=lambda made, i: made[:, i::2])


def halves_transposed(module: str) -> Source:
    """Return the source of experts' matrices [experts, in, out] of gates before what they gate."""
    halves_of = in_halves(module)
    return replace(
        halves_of,
        shapes=lambda shape, _: [(shape[0], shape[2], shape[1])],
        join=lambda tensors, config: halves_of.join([tensors[0].transpose(1, 2)], config),
    )


def rows_of_experts(*modules: str, transposed: bool = False) -> Source:
    """Return the source of experts' matrices one below the other, [experts · width, d_model].

    Those of a gate and of what it gates are two. transposed: ours are [d_model, width].
    """
    n = len(modules)

    def shapes(shape: Shape, _: TransformerConfig) -> list[Shape]:
        n_experts, n_out, n_in = shape
        rows = (n_experts * n_in, n_out) if transposed else (n_experts * n_out // n, n_in)
        return [rows] * n

    def join(tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        parts = [tensor.unflatten(0, (config.n_experts or 1, -1)) for tensor in tensors]
        return parts[0].transpose(1, 2) if transposed else torch.stack(parts, dim=2).flatten(1, 2)

    return Source(modules, shapes, join)


def transposed_experts(module: str) -> Source:
    """Return the source of experts' matrices [experts, in, out]; their biases are as ours."""
    return Source(
        (module,),
        lambda shape, _: [shape if len(shape) == 2 else (shape[0], shape[2], shape[1])],
        lambda tensors, _: tensors[0] if tensors[0].dim() == 2 else tensors[0].transpose(1, 2),
    )


def without_rows(module: str, count: int) -> Source:
    """Return the source of an embedding whose first rows are never looked up."""
    return Source(
        (module,),
        lambda shape, _: [(shape[0] + count, *shape[1:])],
        lambda tensors, _: tensors[0][count:],
    )


def without_first_axis(module: str) -> Source:
    """Return the source of a bias [1, n]."""
    return Source((module,), lambda shape, _: [(1, *shape)], lambda tensors, _: tensors[0][0])


def computed(table: Callable[[int, int], Tensor]) -> Source:
    """Return the source of an embedding of positions that no file holds.

    table: returns [n_positions, d_model] for both numbers.
    """
    return Source((), lambda *_: [], lambda _, config: table(config.max_model_len, config.d_model))


def halves(angles: Tensor) -> Tensor:
    """Return the sines of angles [positions, d_model / 2], followed by their cosines."""
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


def fairseq_sinusoids(n_positions: int, d_model: int) -> Tensor:
    """Return fairseq's table: the last pair turns 1/10000 a position, and the first one is 2."""
    steps = torch.arange(d_model // 2, dtype=torch.float64) / (d_model // 2 - 1)
    places = torch.arange(2, n_positions + 2, dtype=torch.float64)
    return halves(torch.outer(places, 10000.0**-steps))


def or_zeros(module: str) -> Source:
    """Return the source of a bias that a file may leave out."""
    return Source((module,), zeros_if_absent=True)


def all_ones() -> Source:
    """Return the source of a norm without weights."""
    return Source((), lambda *_: [], lambda *_: torch.ones(()))


def first_rows(source: Source, count: int) -> Source:
    """Return the source of an embedding of `count` rows, of which the first are kept."""
    return replace(
        source,
        shapes=lambda shape, config: source.shapes((count, *shape[1:]), config),
        join=lambda tensors, config: source.join(tensors, config)[: config.max_model_len],
    )


def plus_one(module: str) -> Source:
    """Return the source of a norm that multiplies by 1 + weight.

    In 16 bits the sum would have fewer significant bits than the weight, so it is float32.
    """
    return Source((module,), weight_plus=1.0, in_float32=True)


def scaled(source: Source, factor: float) -> Source:
    """Return the source of a module that is multiplied, in float32 so that no bits are lost."""
    assert source.part is None
    join = source.join
    return replace(source, join=lambda t, config: join(t, config).float() * factor, in_float32=True)
