"""Matrices of an int4 graph that keep 8 bits: those that cost most for the bits that they save.

A matrix costs what rounding it to 4 bits, and nothing else, moves the vectors after its layer, in
relation to these. What it costs in the divergence of next tokens is nearly in proportion to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvasir.export.rounding.formulas import quantize_blocks, restore_blocks, was_rounded_before
from kvasir.export.rounding.kv_cache import Floats, scale_kv_channels
from kvasir.export.rounding.quantize import NOT_ROUNDED
from kvasir.export.rounding.weights import SLICE, Weights
from kvasir.export.verification.layers import Ids, LayeredDecoder
from kvasir.model.config import TransformerConfig
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.platform.progress import Progress

BITS_A_WEIGHT = 4.85  # on average of those that can be kept, as in llama.cpp's Q4_K_M
FEWEST_BITS, MOST_BITS = 4.5, 8.0  # of none kept, and of all
_TOKENS = 256  # that are computed


def check_bits(bits: float, *, is_calibrated_int4: bool) -> None:
    """Raise ValueError for bits of a weight that are out of range, or for another export."""
    if not is_calibrated_int4:
        raise ValueError("--bits is for --precision int4 on cpu, with calibration")
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"--bits must be {FEWEST_BITS:g} to {MOST_BITS:g}, not {bits:g}")


def notes_on_bits(bits: float | None, kept: Sequence[str]) -> tuple[str, ...]:
    """Return a note if bits of a weight were given, and no matrix keeps 8 with them."""
    if bits is None or bits == FEWEST_BITS or kept:
        return ()
    chosen = "linear layers of a decoder, outside experts, that were not rounded to 4 bits before"
    return (f"--bits {bits:g} keeps nothing in 8 bits: it chooses from {chosen}, and none fits",)


def keep_in_8_bits(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    kv_scales: Floats,
    row: Ids,
    bits: float,
    progress: Progress,
) -> list[str]:
    """Return the names of the matrices that keep 8 bits, as `choose_kept` has them.

    weights, kv_scales: of `export_graph`. row: tokens, of which the first are computed.
    """
    if bits == FEWEST_BITS:
        return []
    scaled, decoder = Weights(weights), LayeredDecoder(config, weights)
    scale_kv_channels(scaled, config, kv_scales)  # as the graph has them
    costs = decoder.changes(row[:_TOKENS], partial(in_4_bits, scaled), progress)
    return choose_kept(costs, parameter_shapes(config), bits)


def in_4_bits(weights: Weights, name: str, matrix: Tensor) -> Tensor | None:
    """Return a layer's matrix as int4 has it; None if it is not rounded to 4 bits, or was before.

    weights: have the factors of columns with which it is rounded.
    """
    if NOT_ROUNDED.search(name):
        return None
    columns, n_in = weights.columns(name), matrix.shape[1]
    result, was_rounded = torch.empty_like(matrix), True
    step = max(1, SLICE // n_in)
    for rows, of_result in zip(matrix.split(step), result.split(step), strict=True):
        rounded = quantize_blocks(scaled := rows * columns)
        was_rounded = was_rounded and was_rounded_before(scaled, *rounded)
        torch.div(restore_blocks(*rounded)[:, :n_in], columns, out=of_result)
    return None if was_rounded else result


def choose_kept(
    costs: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]], bits: float
) -> list[str]:
    """Return the names of the matrices that keep 8 bits, so that a weight has `bits` at most.

    costs: of each in 4 bits. shapes: of all parameters. Bits are those of a mean weight.
    """
    sizes, kept = {name: math.prod(shapes[name]) for name in costs}, list[str]()
    left = sum(sizes.values()) * (bits - FEWEST_BITS) / (MOST_BITS - FEWEST_BITS)
    for name in sorted(costs, key=lambda name: -costs[name] / sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            kept.append(name)
    return sorted(kept)
