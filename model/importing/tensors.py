"""Where a decoder's parameters are in a published checkpoint, and what has to be done to them.

Each kind of `Source` says what shapes the file must hold for a parameter of ours, so that a whole checkpoint is judged
by its headers, and makes that parameter of the tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.config import DecoderConfig
from model.importing.weights import Shape
from model.network.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Source:
    """Modules of the file that hold a module of ours; `*` in their names is the layer.

    shapes: of ours, what the file must hold. join: those tensors made ours, or what broadcasts to it. in_float32:
    whatever type the file has.
    """

    modules: tuple[str, ...]
    shapes: Callable[[Shape, DecoderConfig], list[Shape]]
    join: Callable[[list[Tensor], DecoderConfig], Tensor]
    in_float32: bool = False


def as_is(module: str) -> Source:
    return Source((module,), lambda shape, _: [shape], lambda tensors, _: tensors[0])


def transposed(module: str) -> Source:
    """A linear layer whose weight is [in, out]; its bias is as ours."""
    return Source((module,), lambda shape, _: [shape[::-1]], lambda tensors, _: tensors[0].t())


def stacked(*modules: str) -> Source:
    """Queries, keys and values, or a gate and what it gates: rows of ours one after the other."""

    def shapes(shape: Shape, config: DecoderConfig) -> list[Shape]:
        if len(modules) == 3:
            rows = [
                n * config.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)
            ]
        else:
            rows = [shape[0] // len(modules)] * len(modules)
        return [(n, *shape[1:]) for n in rows]

    return Source(modules, shapes, lambda tensors, _: torch.cat(tensors))


def interleaved_by_head(module: str) -> Source:
    """Rows of one head's query, key and value, then of the next head's."""

    def join(tensors: list[Tensor], config: DecoderConfig) -> Tensor:
        heads: Tensor = tensors[0].unflatten(0, (config.n_head, 3, config.head_dim))
        return heads.transpose(0, 1).flatten(0, 2)

    return Source((module,), lambda shape, _: [shape], join)


def without_rows(module: str, count: int) -> Source:
    """An embedding whose first rows are never looked up."""
    return Source(
        (module,),
        lambda shape, _: [(shape[0] + count, *shape[1:])],
        lambda tensors, _: tensors[0][count:],
    )


def plus_one(module: str) -> Source:
    """A norm that multiplies by 1 + weight: of 16 bits, the sum would have fewer than the weight."""
    return Source(
        (module,),
        lambda shape, _: [shape],
        lambda tensors, _: tensors[0].float() + 1.0,
        in_float32=True,
    )


def repeated_for_heads(module: str) -> Source:
    """A norm over head_dim whose weight all heads share."""
    return Source((module,), lambda shape, _: [shape[1:]], lambda tensors, _: tensors[0])


class _Uninitialised(TorchFunctionMode):
    """Leaves out random numbers, so that the memory of weights is reserved and never touched.

    The meta device, which reserves nothing, brings in eighty megabytes of torch with its first random number.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in {"normal_", "uniform_", "kaiming_uniform_"}:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every parameter of a decoder by name."""
    if config.position != "learned":  # tables of positions are no parameters
        config = replace(config, max_model_len=2)
    with _Uninitialised():
        return {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}


def rotary_pairs_apart(qkv: Tensor, config: DecoderConfig) -> Tensor:
    """Rows of queries and keys in the order of our pairs (i, i + head_dim / 2), of which the first rotary_dim / 2 turn.

    Published decoders that turn a part of a head pair (i, i + rotary_dim / 2) and leave what follows as it is. qkv:
    [(n_head + 2 n_kv_head) · head_dim, …].
    """
    if config.rotary_dim is None:
        return qkv
    turned, still = torch.arange(config.head_dim).split(
        [config.rotary_dim, config.head_dim - config.rotary_dim]
    )
    order = torch.cat(
        [half for pair in zip(turned.chunk(2), still.chunk(2), strict=True) for half in pair]
    )
    n_heads = config.n_head + config.n_kv_head
    rows = torch.arange(n_heads)[:, None] * config.head_dim + order
    values = torch.arange(n_heads * config.head_dim, qkv.shape[0])
    return qkv[torch.cat((rows.flatten(), values))]
