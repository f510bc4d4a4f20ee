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


def rounded_weight(
    graph: ir.Graph,
    tape: Tape,
    weights: Weights,
    weight: ir.Value,
    bits: int,
    make_rounder: Callable[[], Rounder],
    shapes: tuple[Sequence[int], Sequence[int]],
) -> tuple[ir.Value, ir.Value]:
    """Return a weight's integers, and their scales, of these shapes: blocks have a third axis.

    Integers and scales are written one right after the other, so a weight is rounded once for both,
    and what rounds it is made only then. float16 scales are cast for a graph in float32.
    """
    name, kept = str(weight.name).removesuffix(TRANSPOSED), list[Tensor]()
    in_blocks, stem = len(shapes[0]) > 2, f"{weight.name}.int{bits}"
    in_columns = not in_blocks and name != weight.name  # blocks are always in rows
    casts = bits == 4 and weights.dtype == torch.float32
    dtype = torch.float16 if casts else weights.dtype

    def make_integers() -> Tensor:
        parts = zip(*map(make_rounder(), weights.slices(name)), strict=True)
        integers, scales = (torch.cat(part) for part in parts)
        kept[:] = [scales.to(dtype)]
        return integers.t().contiguous() if in_columns else integers

    def make_scales() -> Tensor:
        if not kept:
            make_integers()
        return kept.pop()

    of_integers = torch.uint8 if in_blocks else torch.int8
    integers = lazy_constant(graph, stem, make_integers, of_integers, shapes[0])
    scales = lazy_constant(graph, f"{stem}.scales", make_scales, dtype, shapes[1])
    return integers, tape.op("Cast", [scales], {"to": ir.DataType.FLOAT}) if casts else scales
