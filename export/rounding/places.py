"""Places where factors may move from activations into weights, and answers stay the same.

A norm, or a product whose outputs enter another one linearly, makes activations; matrices read
them. To divide a channel where it is made, and to multiply its column where it is read, leaves the
function as it is. What rounding loses depends on it: Xiao et al., "SmoothQuant", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import DeltaRule, Mamba, Mamba2, ShortConvolution
from kvasir.model.network.skeleton import parameter_shapes

Factors = NDArray[np.float32]
_OF_HEADS = ".value_up.weight"  # ends the name of a matrix [n_in, n_out] for each head
Shapes = Mapping[str, tuple[int, ...]]


class Maker(NamedTuple):
    """A parameter that makes activations: channel j is its output first + j · step."""

    name: str
    first: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Activations of n_channels, by the names of the parameters that make and that read them.

    group: the channels that come one after the other, as often as `repeats` says, before the next
    ones: those of a head of values, for each head of queries that reads them. squares: activations
    grow as the squares of what is made; factors are powers of four then. n_experts: each of these
    makes and reads channels of its own, and has factors of its own or the same as the others.
    """

    makers: tuple[Maker, ...]
    readers: tuple[str, ...]
    n_channels: int
    group: int = 1
    repeats: int = 1
    _: KW_ONLY
    squares: bool = False
    n_experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the most factors that there can be."""
        return (self.n_channels,) if self.n_experts is None else (self.n_experts, self.n_channels)

    def columns(self, factors: Factors) -> Factors:
        """Return the factor of each column that reads a channel, from those of channels."""
        if factors.ndim > 1:
            return factors
        columns: Factors = factors.reshape(-1, self.group).repeat(self.repeats, axis=0).ravel()
        return columns

    def multipliers(self, factors: Factors, shapes: Shapes) -> dict[str, Factors]:
        """Return what parameters are multiplied by to divide activations by factors.

        factors: [n_channels] or, of each expert, [n_experts, n_channels]. Results broadcast to the
        parameters, whose shapes are given.
        """
        columns = self.columns(factors)
        result = {name: _along(columns, -1, shapes[name]) for name in self.readers}
        made = np.reciprocal(np.sqrt(factors) if self.squares else factors)
        for name, first, step in self.makers:
            if name.endswith(_OF_HEADS):
                result[name] = made.reshape(shapes[name][0], 1, -1)
                continue
            axis = -2 if name.endswith("weight") and len(shapes[name]) > 1 else -1
            outputs = np.ones((*made.shape[:-1], shapes[name][axis]), dtype=np.float32)
            outputs[..., first : first + step * self.n_channels : step] = made
            result[name] = _along(outputs, axis, shapes[name])
        return result


def places(config: TransformerConfig) -> Iterator[Place]:
    """Yield the places of a model, an encoder's before its decoder's."""
    shapes = parameter_shapes(config)
    if config.encoder is not None:
        yield from _of_blocks(config.encoder, shapes, "encoder.")
        ends = (".cross_attention.key_value.weight", ".recurrence.start.weight")
        readers = [name for name in shapes if name.endswith(ends)]
        yield _after_norm(config.encoder, shapes, _last_norm(config.encoder, "encoder."), *readers)
    yield from _of_blocks(config, shapes, "")
    last = _last_norm(config, "")
    if config.head_projection is not None:
        yield _after_norm(config, shapes, last, "norm.1.linear.weight")
        last = "norm.1.norm"
    if {"head.weight", f"{last}.weight"} <= shapes.keys():
        yield _after_norm(config, shapes, last, "head.weight")


def _last_norm(config: TransformerConfig, prefix: str) -> str:
    """Return the norm that makes what a network's blocks show: the last block's or one after it."""
    if config.norm_placement == "post":
        return f"{prefix}blocks.{config.n_layer - 1}.feed_forward_norm"
    return f"{prefix}norm" if config.head_projection is None else f"{prefix}norm.0"


def _of_blocks(config: TransformerConfig, shapes: Shapes, prefix: str) -> Iterator[Place]:
    n_values = config.n_kv_head * config.head_dim
    groups = n_values, config.head_dim, config.n_groups
    for layer in range(config.n_layer):
        block = f"{prefix}blocks.{layer}"
        cross, feed = f"{block}.cross_attention", f"{block}.feed_forward"
        is_mixture = f"{feed}.router.weight" in shapes
        up, down = ("expert_up", "expert_down") if is_mixture else ("up", "down")
        if config.placement_of(layer) in ("pre", "both"):
            first = _first_products(config, shapes, block, layer)
            if f"{block}.attention_norm.weight" in shapes and first:
                yield _after_norm(config, shapes, f"{block}.attention_norm", *first)
            if f"{cross}_norm.weight" in shapes:
                yield _after_norm(config, shapes, f"{cross}_norm", f"{cross}.query.weight")
            modules = (up, "router", "shared.up", "shared_gate") if is_mixture else (up,)
            readers = [name for module in modules if (name := f"{feed}.{module}.weight") in shapes]
            if readers:
                yield _after_norm(config, shapes, f"{feed}_norm", *readers)
        if layer in config.recurrent_layers:
            yield from _of_recurrence(config, shapes, f"{block}.recurrence")
        if config.attends(layer):
            yield from _of_attention(config, shapes, f"{block}.attention", groups)
        if f"{cross}.key_value.weight" in shapes:
            yield _between(shapes, f"{cross}.key_value", f"{cross}.output", n_values, 1, *groups)
        match config.feed_forward if f"{feed}.{down}.weight" in shapes else None:
            case "swiglu" | "geglu" | "geglu_tanh" if is_mixture:
                sizes = 1, 2, config.d_expert or 0
                place = _between(shapes, f"{feed}.{up}", f"{feed}.{down}", *sizes)
                yield replace(place, n_experts=config.n_experts)
                if (shared := config.d_shared_expert) is not None:
                    yield _between(
                        shapes, f"{feed}.shared.up", f"{feed}.shared.down", shared, 1, shared
                    )
            case "swiglu" | "geglu" | "geglu_tanh":
                yield _between(
                    shapes, f"{feed}.{up}", f"{feed}.{down}", config.d_ff, 1, config.d_ff
                )
            case "relu" | "relu2" as kind:
                place = _between(shapes, f"{feed}.{up}", f"{feed}.{down}", 0, 1, config.d_ff)
                yield replace(place, squares=kind == "relu2")


def _of_attention(
    config: TransformerConfig, shapes: Shapes, attention: str, groups: tuple[int, ...]
) -> Iterator[Place]:
    if config.latents is None:
        qkv = f"{attention}.{'qkv' if config.qkv_clip is None else 'clip'}"
        before_values = config.n_head * config.head_dim + groups[0]
        yield _between(shapes, qkv, f"{attention}.output", before_values, 1, *groups)
        return
    values = config.n_head * config.latents.value_dim
    yield _between(shapes, f"{attention}.value_up", f"{attention}.output", 0, 1, values)
    if (rank := config.latents.query_rank) is not None:
        makers = f"{attention}.query_latent_norm", f"{attention}.query"
        yield _between(shapes, *makers, 0, 1, rank)


def _of_recurrence(config: TransformerConfig, shapes: Shapes, recurrence: str) -> Iterator[Place]:
    if isinstance(config.recurrence, ShortConvolution):  # its second gate
        matrices = f"{recurrence}.input", f"{recurrence}.output"
        yield _between(shapes, *matrices, config.d_model, 1, config.d_model)
    elif isinstance(rule := config.recurrence, DeltaRule):  # the norm that heads share
        of_heads = rule.value_dim, rule.value_dim, rule.n_head
        yield _between(shapes, f"{recurrence}.norm", f"{recurrence}.output", 0, 1, *of_heads)
        if (rank := rule.rank) is not None:
            for first, reader in ((rule.parts[0], "gate"), (sum(rule.parts[:3]), "decay")):
                matrices = f"{recurrence}.input", f"{recurrence}.{reader}"
                yield _between(shapes, *matrices, first, 1, rank)
    elif isinstance(config.recurrence, Mamba):  # before steps are widened
        maker = "selection" if config.recurrence.inner_norm_eps is None else "step_norm"
        matrices = f"{recurrence}.{maker}", f"{recurrence}.step_up"
        yield _between(shapes, *matrices, 0, 1, config.recurrence.step_rank)
    elif isinstance(config.recurrence, Mamba2) and config.recurrence.normed:
        matrices = f"{recurrence}.norm", f"{recurrence}.output"
        yield _between(shapes, *matrices, 0, 1, config.recurrence.widths[0])


def _first_products(
    config: TransformerConfig, shapes: Shapes, block: str, layer: int
) -> tuple[str, ...]:
    """Return the matrices that read the input of attention and of a recurrence."""
    first = f"{block}.recurrence.input"
    of_recurrence = tuple(n for n in shapes if n.startswith(first) and n.endswith(".weight"))
    if not config.attends(layer):
        return of_recurrence
    parts: tuple[str, ...] = ("qkv",)
    if (latents := config.latents) is not None:
        parts = ("query" if latents.query_rank is None else "query_latent", "latent")
    parts += ("gate",) if config.attention_gate else ()
    return (*(f"{block}.attention.{part}.weight" for part in parts), *of_recurrence)


def _after_norm(config: TransformerConfig, shapes: Shapes, norm: str, *readers: str) -> Place:
    return Place(_makers(shapes, norm, 0, 1), readers, config.d_model)


def _between(shapes: Shapes, maker: str, reader: str, first: int, step: int, *sizes: int) -> Place:
    """Return the place between a product, or norm, and another; sizes: channels, group, repeats."""
    return Place(_makers(shapes, maker, first, step), (f"{reader}.weight",), *sizes)


def _makers(shapes: Shapes, module: str, first: int, step: int) -> tuple[Maker, ...]:
    names = (f"{module}.{kind}" for kind in ("weight", "bias"))
    return tuple(Maker(name, first, step) for name in names if name in shapes)


def _along(values: Factors, axis: int, shape: tuple[int, ...]) -> Factors:
    """Return values as an array that broadcasts along an axis of a shape, counted from the end.

    values: [n] or, for each part of the first axis, [parts, n].
    """
    sizes = [1] * len(shape)
    sizes[axis] = values.shape[-1]
    if values.ndim > 1:
        sizes[0] = len(values)
    return values.reshape(sizes)
