"""Smoothing: outliers of activations move into the weights that read them, before rounding.

A token in 8 bits loses what is small beside its largest number. Published models have channels that
are 20 to 100 times the others. With a_j the size of channel j in activations, and w_j the largest
of its weights, each relative to the size of the output that it is for, channel j is divided by

    k_j = a_j^p / w_j^(1 - p)

where it is made, and its columns are multiplied by k_j (Xiao et al., "SmoothQuant", 2023; for
rounded weights alone Lin et al., "AWQ", 2024). Of several powers p, and of a place left as it is,
the one is taken whose products of a sample lose least, relative to each output and token. Any p
gives the same products however such factors were spread before, so outliers that are nothing but
such factors cost nothing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvasir.export.rounding.formulas import (
    SMALLEST_SCALE,
    quantize_blocks,
    quantize_rows,
    restore_blocks,
)
from kvasir.export.rounding.places import Factors, Place, places
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Device
from kvasir.model.network.feed_forward import ExpertLinear
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.platform.progress import Progress, no_progress, with_progress
from kvasir.model.tensor_files import LazyWeights

_POWERS = (0.3, 0.5, 0.7, 0.85, 1.0)
_EVERY = 16  # of so many tokens one is kept
_TOKENS, _ROWS = 256, 128  # of the sample, and of each matrix, that products are measured on
_FEWER = 4  # of the tokens, for the size of outputs
_SMALLEST = 1e-6  # of the largest magnitude: channels below it count as silent

Change = Callable[[Tensor], Tensor]


class Rounding(NamedTuple):
    """What rounding makes of activations [tokens, n_in], and of weights [n_out, n_in]."""

    of_activations: Change
    of_weights: Change


def _in_rows(matrix: Tensor) -> Tensor:
    integers, scales = quantize_rows(matrix.clone())
    return integers * scales[:, None]


def _in_blocks(matrix: Tensor, bits: int) -> Tensor:
    return restore_blocks(*quantize_blocks(matrix, bits), bits)[:, : matrix.shape[1]]


BITS = {"int8": 8, "int4": 4}  # of the precisions that round weights
_IN_ROWS = Rounding(_in_rows, _in_rows)


def roundings(device: Device, precision: str, *, is_expert: bool) -> list[Rounding]:
    """Return how products are rounded on a device in int8 or int4: steps', and perhaps prompts'."""
    in_blocks = partial(_in_blocks, bits=BITS[precision])
    if device != "cpu":
        return [Rounding(lambda x: x, in_blocks)]
    if is_expert or precision == "int4":
        of_steps = Rounding(partial(_in_blocks, bits=8), in_blocks)
        return [of_steps] if is_expert else [of_steps, _IN_ROWS]
    return [_IN_ROWS]


class Activations:
    """What products read, by the name of their weight: the largest magnitudes and some tokens.

    folder: keeps all tokens, which may take more room than the weights; None keeps some in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._largest: dict[str, Tensor] = {}
        self._kept = defaultdict[str, list[Tensor]](list)
        self._columns: dict[str, Tensor] = {}  # by which inputs are divided
        self.report: dict[str, Any] = {}  # for the manifest

    def describe(self, name: str, rows: Sequence[Sequence[int] | NDArray[np.int64]]) -> None:
        """Note which tokens these are of; name: of their text."""
        digest = hashlib.sha256(b"".join(np.asarray(row, dtype="<i8").tobytes() for row in rows))
        n_tokens = sum(map(len, rows))
        self.report |= {"text": name, "tokens": n_tokens, "sha256": digest.hexdigest()}

    @contextmanager
    def watch(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Note the inputs of a module's products while the block runs; prefix: of their names."""
        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if isinstance(part, nn.Linear | ExpertLinear):
                    note = partial(self._note, f"{prefix}{name}.weight")
                    hooks.enter_context(part.register_forward_pre_hook(note))
            yield

    def _note(self, name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.add(name, arguments[0])

    def add(self, name: str, x: Tensor) -> None:
        """Take activations [..., n_in] into account."""
        x = x.detach().flatten(0, -2)
        if len(x):
            largest = x.abs().amax(dim=0).cpu()
            self._largest[name] = torch.maximum(largest, self._largest.get(name, largest))
            if self._folder is None:
                self._kept[name].append(x[::_EVERY].to("cpu", torch.bfloat16, copy=True))
                return
            with (self._folder / name).open("ab") as file:
                x.to("cpu", torch.bfloat16).view(torch.int16).numpy().tofile(file)

    def largest(self, name: str) -> Tensor:
        """Return the largest magnitudes, [n_in]."""
        return self._largest[name]

    def tokens(self, name: str) -> Tensor:
        """Return some tokens, [tokens, n_in]."""
        kept = self._read(name)
        return kept[:: -(-len(kept) // _TOKENS)].float()

    def divide(self, name: str, columns: Tensor) -> None:
        """Note by what the inputs of a product are divided, [n_in]."""
        self._columns[name] = columns

    def inputs(self, name: str) -> Tensor | None:
        """Return all tokens as the product reads them, [tokens, n_in]; None without a folder."""
        if self._folder is None or name not in self._largest:
            return None
        x = self._read(name).float()
        return x / self._columns[name] if name in self._columns else x

    def _read(self, name: str) -> Tensor:
        if self._folder is None:
            return torch.cat(self._kept[name])
        values = torch.from_numpy(np.fromfile(self._folder / name, dtype=np.int16))
        return values.view(torch.bfloat16).view(-1, len(self._largest[name]))


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
    ValueError for activations that are not finite.
    """
    shapes, scaled = parameter_shapes(config), defaultdict[str, list[Factors]](list)
    chosen = [
        place
        for place in places(config)
        if not (keeps_values and place.readers[0].endswith(".attention.output.weight"))
    ]
    activations.report |= {"places": len(chosen), "smoothed": 0}
    for place in with_progress(chosen, "smoothing outliers", progress):
        factors = choose_factors(place, weights, activations, device, precision)
        if factors is not None:
            activations.report["smoothed"] += 1
            for name, multiplier in place.multipliers(factors, shapes).items():
                scaled[name].append(multiplier)
                if name in place.readers:
                    activations.divide(name, torch.from_numpy(multiplier).ravel())

    def read(name: str) -> Tensor:
        weight = weights[name]
        for factors in scaled.get(name, ()):
            weight = weight.float() * torch.from_numpy(factors)
        return weight

    return LazyWeights({name: partial(read, name) for name in weights})


def choose_factors(
    place: Place,
    weights: Mapping[str, Tensor],
    activations: Activations,
    device: Device,
    precision: str,
) -> Factors | None:
    """Return a place's factors [n_channels] with the least error; None to leave it as it is."""
    x = activations.tokens(place.readers[0])
    largest = activations.largest(place.readers[0])
    if not largest.isfinite().all():
        raise ValueError(
            f"the inputs of {place.readers[0]} are not all finite; the model cannot be rounded"
        )
    matrices, widest = list[tuple[Tensor, list[Rounding]]](), torch.zeros(x.shape[1])
    for name in place.readers:
        stored = weights[name]
        is_expert, stored = stored.dim() == 3, stored.flatten(0, -2)
        for part in stored.split(2**12):
            rows = part.float()
            outputs = (x[::_FEWER] @ rows.t()).square().mean(dim=0).sqrt()
            reach = rows.abs() / outputs.clamp(min=SMALLEST_SCALE)[:, None]
            widest = torch.maximum(widest, reach.amax(dim=0))
        if not name.endswith("router.weight"):
            some = stored[:: -(-len(stored) // _ROWS)].float()
            matrices.append((some, roundings(device, precision, is_expert=is_expert)))

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

    per_channel = partial(_per_channel, place)
    weight_reach = per_channel(widest, Tensor.amax)
    best, factors = error(torch.ones(x.shape[1])), None
    sizes = [
        per_channel(largest, Tensor.amax),
        per_channel(x.square().mean(dim=0), Tensor.mean).sqrt(),
    ]
    for size, power in [(sizes[0], 0.0), *product(sizes, _POWERS)]:
        candidate = _factors(size, weight_reach, power)
        columns = candidate.reshape(-1, place.group).repeat_interleave(place.repeats, dim=0).ravel()
        if (found := error(columns)) < best:
            best, factors = found, candidate
    return None if factors is None else factors.numpy()


def _per_channel(place: Place, columns: Tensor, join: Callable[..., Tensor]) -> Tensor:
    """Join the columns of each of a place's channels."""
    return join(columns.reshape(-1, place.repeats, place.group), dim=1).ravel()


def _factors(largest: Tensor, weight_reach: Tensor, power: float) -> Tensor:
    """Return k_j, of which the geometric mean is 1; 1 where activations or weights are silent."""
    loud = (largest > _SMALLEST * largest.max()) & (weight_reach > _SMALLEST * weight_reach.max())
    logs = power * largest.log() - (1.0 - power) * weight_reach.log()
    if loud.any():
        logs -= logs[loud].mean()
    return logs.exp().where(loud, torch.ones(()))
