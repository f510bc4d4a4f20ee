"""Adapters as ONNX Runtime's own operators read them: see `kernels.adapt_stock`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.adapter_table import ADAPTERS
from kvasir.model.adapters.config import refuse
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import read_adapter
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters, numbered

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvasir.kernels.library import Library

_STEP = 16  # of ranks: numbers beside each other in a sum stay so with more zeros behind them
_NO_TABLE = np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class StockAdapters(GraphAdapters):
    """Adapters as float32, whose parts of a layer are one: their ranks follow each other."""

    _slots: dict[tuple[bytes, ...], dict[str, NDArray[Any]]] = field(default_factory=dict)

    def _add(self, model: ModelProto, names: Mapping[str, str]) -> None:
        """See GraphAdapters."""
        from kvasir.kernels.adapt_stock import add_stock_adapters  # noqa: PLC0415  imports onnx

        layers = self.layout.layers.items()
        sizes = {name: (len(layer.inputs), len(layer.outputs)) for name, layer in layers}
        add_stock_adapters(model, names, sizes)

    def load(self, folder: Path, name: str, most_bytes: int) -> Adapter:
        """See GraphAdapters. A is [2, n_in, h], and B [2, h, n_out]."""
        given = read_adapter(folder, name, self.layout, most_bytes)
        matrices = dict[str, list[NDArray[Any]]]()
        for layer, parts in groupby(self._parts_of(name, given.modules), itemgetter(0)):
            found, shape = list(parts), self.layout.layers[layer]
            half = -(-sum(len(a) for *_, a, _ in found) // _STEP) * _STEP // 2
            widths = len(shape.inputs), len(shape.outputs)
            a, b = (np.zeros((2 * half, n), dtype=np.float32) for n in widths)
            first = 0
            for _, _, part, low_a, low_b in found:
                ranks = slice(first, first := first + len(low_a))
                a[ranks], b[ranks, part.first : part.first + len(part.rows)] = low_a, low_b.T
            if not all(np.isfinite(matrix).all() for matrix in (a, b)):
                expected = "numbers that are finite with the model's factors"
                raise refuse(name, layer, "too large", expected)
            # [rank, n] to even and odd ranks
            of_a, of_b = (matrix.reshape(half, 2, -1).swapaxes(0, 1) for matrix in (a, b))
            matrices[layer] = [of_a.swapaxes(1, 2), of_b]
        return Adapter(name, given.digest, given.base, _NO_TABLE, matrices, self)

    def inputs(
        self,
        adapters: Sequence[Adapter | None],
        counts: NDArray[np.int64] | None = None,  # noqa: ARG002
    ) -> dict[str, NDArray[Any]]:
        """See GraphAdapters. Packed texts are rows here, too."""
        used, index = numbered(adapters)
        key = tuple(adapter.digest for adapter in used)
        if (slots := self._slots.get(key)) is None:
            self._slots.clear()  # steps that follow each other have the same adapters
            self._slots[key] = slots = self._fill(used)
        return {ADAPTERS: index + 1} | slots

    def _fill(self, used: list[Adapter]) -> dict[str, NDArray[Any]]:
        """Return each layer's matrices in slots, of the largest rank, the first of zeros."""
        slots = dict[str, NDArray[Any]]()
        for name, layer in self.layout.layers.items():
            pairs = [adapter.matrices.get(name) for adapter in used]
            half = max((len(pair[1][0]) for pair in pairs if pair), default=1)
            shapes = (len(layer.inputs), half), (half, len(layer.outputs))
            a, b = (np.zeros((1 + len(used), 1, 2, *n), dtype=np.float32) for n in shapes)
            for i, pair in enumerate(pairs, 1):
                if pair is not None:
                    a[i, 0, :, :, : len(pair[1][0])], b[i, 0, :, : len(pair[1][0])] = pair
            slots |= {f"{name}.a": a, f"{name}.b": b}
        return slots


def graph_adapters(layout: Layout | None, library: Library | None) -> GraphAdapters | None:
    """Return adapters for graphs whose products are a library's or ONNX Runtime's; None without."""
    if layout is None:
        return None
    return StockAdapters(layout) if library is None else GraphAdapters(layout, library)
