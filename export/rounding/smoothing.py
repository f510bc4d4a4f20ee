"""Smoothing: outliers of activations move into the weights that read them, before rounding.

A token in 8 bits loses what is small beside its largest number. Published models have channels that
are 20 to 100 times the others. With a_j the size of channel j in activations (the largest, or root
mean square), and w_j the largest of its weights over the size of the weight's output, channel j is
divided by

    k_j = a_j^p / w_j^(1 - p)

where it is made, and its columns are multiplied by k_j (Xiao et al., "SmoothQuant", 2023; for
rounded weights alone Lin et al., "AWQ", 2024). k_j is rounded to a power of two, so no weight
changes but by its exponent. Of several powers p, and of a place left as it is, the one is taken
whose products of a sample lose least, relative to each output and token. Any p gives the same
products however such factors were spread before, so outliers that are nothing but such factors cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kvasir.export.rounding.activations import Activations
from kvasir.export.rounding.formulas import (
    BITS,
    SMALLEST_SCALE,
    quantize_blocks,
    quantize_rows,
    restore_blocks,
)
from kvasir.export.rounding.mixing import is_mixed, mix, mix_weights
from kvasir.export.rounding.places import Factors, Place, places
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Device
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.platform.progress import Progress, no_progress, with_progress
from kvasir.model.tensor_files import LazyWeights

_POWERS = (0.3, 0.5, 0.7, 0.85, 1.0)
_ROWS = 128  # of each matrix that products are measured on
_FEWER = 4  # of the tokens, for the size of outputs
_SMALLEST = 1e-6  # of the largest magnitude: channels below it count as silent

Change = Callable[[Tensor], Tensor]


class Rounding(NamedTuple):
    """Two functions that return activations [tokens, n_in], and weights [n_out, n_in], rounded."""

    of_activations: Change
    of_weights: Change


def _in_rows(matrix: Tensor) -> Tensor:
    integers, scales = quantize_rows(matrix.clone())
    return integers * scales[:, None]


def _in_blocks(matrix: Tensor, bits: int) -> Tensor:
    return restore_blocks(*quantize_blocks(matrix, bits), bits)[:, : matrix.shape[1]]


_IN_ROWS = Rounding(_in_rows, _in_rows)
_MIXED = Rounding(lambda x: _in_rows(mix(x)), lambda matrix: _in_rows(mix_weights(matrix)))


def roundings(device: Device, precision: str, name: str, n_in: int) -> list[Rounding]:
    """Return how a product is rounded in int8 or int4: in steps, and perhaps in prompts.

    name: of its weight. Where the product is mixed, both functions mix before they round.
    """
    is_expert = ".expert_" in name
    in_rows = _MIXED if is_mixed(name, n_in) else _IN_ROWS
    in_blocks = partial(_in_blocks, bits=BITS[precision])
    if device != "cpu":
        return [Rounding(lambda x: x, in_blocks)]
    if is_expert or (precision == "int4" and name != "head.weight"):
        of_steps = Rounding(partial(_in_blocks, bits=8), in_blocks)
        return [of_steps] if is_expert else [of_steps, in_rows]
    return [in_rows]


def smooth(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    activations: Activations,
    device: Device,
    precision: str,
    progress: Progress = no_progress,
    *,
    keeps_values: bool = False,
) -> Mapping[str, Tensor]:
    """Return weights of the same function that lose less when they are rounded.

    keeps_values: attention's values get their scales elsewhere (export.rounding.kv_cache). Raises
    ValueError as `Activations.check`.
    """
    activations.check()
    shapes, scaled = parameter_shapes(config), activations.multipliers
    chosen = [
        place
        for place in places(config)
        if not (
            keeps_values
            and config.latents is None
            and place.readers[0].endswith(".attention.output.weight")
        )
    ]
    activations.report |= {"places": len(chosen), "smoothed": 0}
    for place in with_progress(chosen, "smoothing outliers", progress):
        factors = choose_factors(place, weights, activations, device, precision)
        if factors is not None:
            activations.report["smoothed"] += 1
            for name, multiplier in place.multipliers(factors, shapes).items():
                scaled[name].append(multiplier)
                if name in place.readers:
                    activations.columns[name] = torch.from_numpy(multiplier).ravel()

    def read(name: str) -> Tensor:
        weight = weights[name]
        for factors in map(torch.from_numpy, scaled.get(name, ())):
            # Powers of two have no digits that bfloat16 lacks; float16 lacks exponents.
            dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
            weight = weight.to(dtype) * factors.to(dtype)
        return weight

    return LazyWeights({name: partial(read, name) for name in weights})


def choose_factors(
    place: Place,
    weights: Mapping[str, Tensor],
    activations: Activations,
    device: Device,
    precision: str,
) -> Factors | None:
    """Return a place's factors [n_channels] with the least error; None to leave it as it is.

    A place stays as it is if int4 finds a matrix that was rounded so before: it would lose that.
    """
    x = activations.tokens(place.readers[0])
    matrices, widest = list[tuple[Tensor, list[Rounding]]](), torch.zeros(x.shape[1])
    for name in place.readers:
        stored = weights[name].flatten(0, -2)
        for part in stored.split(2**12):
            rows = part.float()
            outputs = (x[::_FEWER] @ rows.t()).square().mean(dim=0).sqrt()
            reach = rows.abs() / outputs.clamp(min=SMALLEST_SCALE)[:, None]
            widest = torch.maximum(widest, reach.amax(dim=0))
        if not name.endswith(("router.weight", "shared_gate.weight")):
            some = stored[:: -(-len(stored) // _ROWS)].float()
            if precision == "int4" and torch.equal(_in_blocks(some, bits=4), some):
                return None
            matrices.append((some, roundings(device, precision, name, x.shape[1])))

    def error(columns: Tensor) -> float:
        total = 0.0
        for matrix, of_matrix in matrices:
            exact = x @ matrix.t()
            of_outputs = exact.square().mean(dim=0).clamp(min=SMALLEST_SCALE)
            of_tokens = (exact.square() / of_outputs).mean(dim=1).clamp(min=SMALLEST_SCALE)
            for of_activations, of_weights in of_matrix:
                rounded = of_activations(x / columns) @ of_weights(matrix * columns).t()
                errors = (rounded - exact).square() / of_outputs
                total += (errors.mean(dim=1) / of_tokens).mean().item()
        return total

    def per_channel(columns: Tensor, join: Callable[..., Tensor]) -> Tensor:
        return join(columns.reshape(-1, place.repeats, place.group), dim=1).ravel()

    weight_reach = per_channel(widest, Tensor.amax)
    best = error(torch.ones(x.shape[1]))
    factors: Factors | None = None
    sizes = [
        per_channel(activations.largest[place.readers[0]], Tensor.amax),
        per_channel(x.square().mean(dim=0), Tensor.mean).sqrt(),
    ]
    for size, power in [(sizes[0], 0.0), *product(sizes, _POWERS)]:
        candidate = _factors(size, weight_reach, power, squares=place.squares)
        if (found := error(torch.from_numpy(place.columns(candidate)))) < best:
            best, factors = found, candidate
    return factors


def _factors(largest: Tensor, weight_reach: Tensor, power: float, *, squares: bool) -> Factors:
    """Return k_j, of which the geometric mean is about 1; 1 where either is silent."""
    loud = (largest > _SMALLEST * largest.max()) & (weight_reach > _SMALLEST * weight_reach.max())
    logs = power * largest.log2() - (1.0 - power) * weight_reach.log2()
    step = 2.0 if squares else 1.0
    if loud.any():
        logs -= logs[loud].mean().round()
    factors: Factors = (step * (logs / step).round()).exp2().where(loud, torch.ones(())).numpy()
    return factors
