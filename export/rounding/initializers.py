"""Initializers of a rounded weight: integers, and their scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from torch import Tensor

from kvasir.export.rewrite import lazy_constant
from kvasir.export.rounding.formulas import quantize_blocks
from kvasir.export.rounding.gptq import column_rounder
from kvasir.export.rounding.weights import TRANSPOSED, Weights

Rounder = Callable[[Tensor], tuple[Tensor, Tensor]]  # of a matrix, to integers and scales


def block_rounder(weights: Weights, name: str, bits: int) -> Rounder:
    """Return what rounds a weight in blocks: to 4 bits by its inputs, where these are known."""
    x = weights.inputs(name) if bits == 4 else None
    if x is None:
        return partial(quantize_blocks, bits=bits)
    return column_rounder(x)


def weight_in_blocks(
    graph: ir.Graph,
    tape: Tape,
    weights: Weights,
    weight: ir.Value,
    bits: int,
    make_rounder: Callable[[], Rounder],
    shapes: tuple[Sequence[int], Sequence[int]],
) -> tuple[ir.Value, ir.Value]:
    """Return a weight's integers and their scales, which a node casts if they are float16."""
    casts = bits == 4 and weights.dtype == torch.float32
    types = torch.uint8, torch.float16 if casts else weights.dtype
    integers, scales = rounded_weight(
        graph, weights, weight, f"int{bits}", make_rounder, types, shapes
    )
    if casts:
        scales = tape.op("Cast", [scales], {"to": ir.DataType.FLOAT})
    return integers, scales


def rounded_weight(
    graph: ir.Graph,
    weights: Weights,
    weight: ir.Value,
    kind: str,
    make_rounder: Callable[[], Rounder],
    types: tuple[torch.dtype, torch.dtype],
    shapes: tuple[Sequence[int], Sequence[int]],
) -> tuple[ir.Value, ir.Value]:
    """Return initializers of a weight's integers and scales, of these types and shapes.

    One is written right after the other, so a weight is rounded once for both, and what rounds it
    is made only then.
    """
    name, kept = str(weight.name).removesuffix(TRANSPOSED), list[Tensor]()
    in_columns = len(shapes[0]) == 2 and name != weight.name  # blocks are always in rows

    def make_integers() -> Tensor:
        parts = zip(*map(make_rounder(), weights.slices(name)), strict=True)
        integers, scales = (torch.cat(part) for part in parts)
        kept[:] = [scales.to(types[1])]
        return integers.t().contiguous() if in_columns else integers

    def make_scales() -> Tensor:
        if not kept:
            make_integers()
        return kept.pop()

    return (
        lazy_constant(graph, f"{weight.name}.{kind}", make_integers, types[0], shapes[0]),
        lazy_constant(graph, f"{weight.name}.{kind}.scales", make_scales, types[1], shapes[1]),
    )
