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
from kvasir.export.rounding.keys import balance_keys
from kvasir.export.rounding.mixing import is_mixed, mix, mix_weights
from kvasir.export.rounding.places import Factors, Place, places
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Device
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.platform.progress import Progress, no_progress, with_progress
from kvasir.model.tensor_files import LazyWeights

_POWERS = (0.3, 0.5, 0.7, 0.85, 1.0)
_ROWS, _OF_EXPERT = 128, 16  # rows of each matrix that products are measured on
_FEWER = 4  # of the tokens, for the size of outputs
_SMALLEST = 1e-6  # of the largest magnitude: channels below it count as silent
_IN_FLOATS = ("router.weight", "shared_gate.weight")  # end names of matrices that are not rounded

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
    of_texts, prefix = (config, "") if config.pooling else (config.encoder, "encoder.")
    if of_texts is not None:
        for name, multiplier in balance_keys(of_texts, weights, activations, prefix):
            scaled[name].append(multiplier)
    for place in with_progress(chosen, "smoothing outliers", progress):
        factors = choose_factors(place, weights, activations, device, precision)
        if factors is not None:
            activations.report["smoothed"] += 1
            for name, multiplier in place.multipliers(factors, shapes).items():
                scaled[name].append(multiplier)
                if name in place.readers:
                    activations.columns[name] = torch.from_numpy(place.columns(factors))

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
    """Return a place's factors with the least error; None to leave it as it is.

    They are [n_channels] or, where experts lose less with factors of their own, of the place's
    `shape`. A place stays as it is if int4 finds a matrix that was rounded so before: it would lose
    that.
    """
    first = place.readers[0]
    x, experts = activations.tokens(first)
    stored = {name: weights[name] for name in place.readers}
    matrices = (matrix for name, matrix in stored.items() if not name.endswith(_IN_FLOATS))
    if precision == "int4" and any(map(_is_in_blocks, matrices)):
        return None
    measure = partial(_least_error, place, device, precision)
    if place.n_experts is None:
        return measure(stored, x, activations.largest[first])[1]
    lost, factors = measure(stored, x, activations.largest[first], experts)
    balance = _balance(place, weights[place.makers[0].name], stored[first])
    stored = {name: m * balance[:, None].to(m.dtype) for name, m in stored.items()}
    x = x / balance[experts]
    lost_balanced, more = measure(stored, x, x.abs().amax(dim=0), experts)
    if lost_balanced < lost:
        factors = balance.numpy() if more is None else balance.numpy() * more
    return factors


def _is_in_blocks(matrix: Tensor) -> bool:
    """Tell whether 4 bits hold rows of a matrix to the bit."""
    rows = _some_rows(matrix)
    return torch.equal(_in_blocks(rows, bits=4), rows)


def _least_error(
    place: Place,
    device: Device,
    precision: str,
    stored: Mapping[str, Tensor],
    x: Tensor,
    largest: Tensor,
    experts: Tensor | None = None,
) -> tuple[float, Factors | None]:
    """Return the least error of any factors [n_channels], and these; None for ones.

    stored: the place's readers by name. x: tokens [tokens, n_in]. largest: magnitudes of all
    tokens, [n_in]. experts: the one that reads each token, where readers are experts' alone.
    """
    matrices, widest = list[tuple[Tensor, list[Rounding]]](), torch.zeros(x.shape[1])
    for name, matrix in stored.items():
        for part in matrix.flatten(0, -2).split(2**12):
            rows = part.float()
            outputs = (x[::_FEWER] @ rows.t()).square().mean(dim=0).sqrt()
            reach = rows.abs() / outputs.clamp(min=SMALLEST_SCALE)[:, None]
            widest = torch.maximum(widest, reach.amax(dim=0))
        if not name.endswith(_IN_FLOATS):
            if experts is None:
                some = _some_rows(matrix)
            else:  # [n_experts, rows, n_in]
                some = torch.stack([_some_rows(of_one, _OF_EXPERT) for of_one in matrix])
            matrices.append((some, roundings(device, precision, name, x.shape[1])))

    def multiply(tokens: Tensor, rows: Tensor) -> Tensor:
        return tokens @ rows.t() if experts is None else (rows[experts] @ tokens[..., None])[..., 0]

    def error(columns: Tensor) -> float:
        total = 0.0
        for matrix, of_matrix in matrices:
            exact = multiply(x, matrix)
            squares = exact.square()
            # An expert reads too few tokens to tell the size of each output.
            of_outputs = squares.mean(dim=0) if experts is None else squares.mean()
            of_outputs = of_outputs.clamp(min=SMALLEST_SCALE)
            of_tokens = (squares / of_outputs).mean(dim=1).clamp(min=SMALLEST_SCALE)
            for of_activations, of_weights in of_matrix:
                rows = of_weights((matrix * columns).flatten(0, -2)).view_as(matrix)
                errors = (multiply(of_activations(x / columns), rows) - exact).square() / of_outputs
                total += (errors.mean(dim=1) / of_tokens).mean().item()
        return total

    def per_channel(columns: Tensor, join: Callable[..., Tensor]) -> Tensor:
        return join(columns.reshape(-1, place.repeats, place.group), dim=1).ravel()

    weight_reach = per_channel(widest, Tensor.amax)
    best = error(torch.ones(x.shape[1]))
    factors: Factors | None = None
    sizes = [
        per_channel(largest, Tensor.amax),
        per_channel(x.square().mean(dim=0), Tensor.mean).sqrt(),
    ]
    for size, power in [(sizes[0], 0.0), *product(sizes, _POWERS)]:
        candidate = _factors(size, weight_reach, power, squares=place.squares)
        if (found := error(torch.from_numpy(place.columns(candidate)))) < best:
            best, factors = found, candidate
    return best, factors


def _some_rows(matrix: Tensor, n: int = _ROWS) -> Tensor:
    rows = matrix.flatten(0, -2)
    return rows[:: -(-len(rows) // n)].float()


def _balance(place: Place, making: Tensor, reading: Tensor) -> Tensor:
    """Return factors [n_experts, n_channels] that leave experts none of their own.

    k_j = (|row j of what makes| / |column j of what reads|)^1/2 of an expert, over the geometric
    mean of all experts'. A sample of tokens has too few of each expert's to tell.
    """
    _, first, step = place.makers[0]
    rows = torch.stack([expert[first::step].float().norm(dim=1) for expert in making])
    columns = torch.stack([expert.float().norm(dim=0) for expert in reading])
    of_rows, of_columns = (norms.clamp(min=SMALLEST_SCALE).log2() for norms in (rows, columns))
    logs = (of_rows - of_columns) / 2.0
    return (logs - logs.mean(dim=0)).round().exp2()


def _factors(largest: Tensor, weight_reach: Tensor, power: float, *, squares: bool) -> Factors:
    """Return k_j, of which the geometric mean is about 1; 1 where either is silent."""
    loud = (largest > _SMALLEST * largest.max()) & (weight_reach > _SMALLEST * weight_reach.max())
    logs = power * largest.log2() - (1.0 - power) * weight_reach.log2()
    step = 2.0 if squares else 1.0
    if loud.any():
        logs -= logs[loud].mean().round()
    factors: Factors = (step * (logs / step).round()).exp2().where(loud, torch.ones(())).numpy()
    return factors
