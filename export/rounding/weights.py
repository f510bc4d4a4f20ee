"""A decoder's parameters as a graph stores them: read, scaled and converted, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.rounding.activations import Activations
from kvasir.model.adapters.layout import Layer, Layout

TRANSPOSED = ".T"  # ends the name of a weight that the graph has transposed
Inputs = Callable[[str], Tensor | None]
SLICE = 2**21  # numbers in memory as float32 at once


class Weights:
    """A decoder's parameters in the graph's type, made from stored ones whenever they are read.

    stored: by the decoder's names, of any type of floats. dtype: the type of the graph. inputs:
    returns what a product reads by its weight's name, [tokens, n_in], or None.
    """

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        inputs: Inputs | None = None,
    ) -> None:
        self.dtype, self._inputs = dtype, inputs
        self._stored = stored
        self._factors = defaultdict[str, list[Tensor]](list)

    def scale(self, name: str, factors: NDArray[np.float32]) -> None:
        """Multiply a parameter by factors that broadcast to it."""
        self._factors[name].append(torch.from_numpy(factors))

    def factors(self, name: str) -> list[NDArray[np.float32]]:
        """Return the factors of a parameter, which broadcast to it."""
        return [factor.numpy() for factor in self._factors[name]]

    def columns(self, name: str) -> Tensor:
        """Return the factors of a matrix's columns, [n_in]; 1, [1], where there are none."""
        columns = torch.ones(1)
        for factor in self._factors[name]:
            if factor.shape[-1] > 1:
                columns = columns * factor.ravel()
        return columns

    def inputs(self, name: str) -> Tensor | None:
        """Return what a product with a scaled weight reads, [tokens, n_in]; None if unknown."""
        x = None if self._inputs is None else self._inputs(name)
        return None if x is None else x / self.columns(name)

    def slices(self, name: str, stored: Tensor | None = None) -> Iterator[Tensor]:
        """Return some rows after others in float32, which may be overwritten.

        stored: the parameter, if it has been read.
        """
        stored = self._stored[name] if stored is None else stored
        n_rows = len(stored)
        step = max(1, SLICE * n_rows // max(1, stored.numel()))
        factors = [factor.expand(n_rows, *factor.shape[1:]) for factor in self._factors[name]]
        for start in range(0, n_rows, step):
            rows = stored[start : start + step].to(torch.float32, copy=True)
            for factor in factors:
                rows *= factor[start : start + step]
            yield rows if self.dtype == torch.float32 else rows.to(self.dtype).float()

    def read(self, name: str, *, transposed: bool = False) -> Tensor:
        """Return a parameter, contiguous in memory."""
        stored = self._stored[name]
        if stored.dtype == self.dtype and not self._factors[name] and not transposed:
            return stored.contiguous()
        result = torch.empty(stored.shape[::-1] if transposed else stored.shape, dtype=self.dtype)
        rows_of_result, start = result.t() if transposed else result, 0
        for rows in self.slices(name, stored):
            rows_of_result[start : start + len(rows)] = rows
            start += len(rows)
        return result


def with_factors(layout: Layout, weights: Weights, activations: Activations | None) -> Layout:
    """Return a layout with the factors of weights, and with those that smooth activations.

    Adapters, which are added to products, get them too.
    """
    smoothing = {} if activations is None else activations.multipliers

    def scaled(name: str, layer: Layer) -> Layer:
        outputs, inputs = layer.outputs, layer.inputs
        for factor in [*smoothing.get(name, ()), *weights.factors(name)]:
            if factor.shape[-1] > 1:  # [1, n_in]
                inputs = inputs * factor.ravel()
            else:  # [n_out, 1], or one number
                outputs = outputs * factor.ravel()
        as_float32 = (values.astype(np.float32) for values in (outputs, inputs))
        return Layer(layer.parts, *as_float32)

    layers = {name: scaled(name, layer) for name, layer in layout.layers.items()}
    return replace(layout, layers=layers)
