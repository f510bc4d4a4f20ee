"""An adapter in memory: matrices with the graph's factors, and their addresses.

Memory lives as long as something refers to the adapter: its sequences, and the run that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.adapter_table import (
    ADAPTERS,
    HADAMARD,
    LANES,
    TABLE,
    TABLE_NUMBERS,
    Place,
)
from kvasir.model.adapters.config import AdapterError, refuse
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import Factors, read_adapter

_LARGEST = np.float32((2 - 2**-7) * 2.0**127)  # of 16 bits; larger ones may become infinite


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter. table: int64 [parts of the graph, TABLE_NUMBERS].

    digest: of its content. base: the model that it names. n_bytes: of its matrices, which are held
    for their addresses.
    """

    name: str
    digest: bytes
    base: str | None
    table: NDArray[np.int64]
    n_bytes: int
    matrices: tuple[NDArray[np.uint16], ...]


@dataclass(frozen=True)
class GraphAdapters:
    """The places of adapters in a graph, and the layout by which it reads them.

    places: of each layer in the graph's table, once a session has opened it. Matrices keep the
    upper 16 bits of their numbers, rounded.
    """

    layout: Layout
    places: dict[str, Place] = field(default_factory=dict)

    @cached_property
    def n_parts(self) -> dict[str, int]:
        """The number of each layer's parts."""
        return {name: len(layer.parts) for name, layer in self.layout.layers.items()}

    def load(self, folder: Path, name: str, most_bytes: int) -> Adapter:
        """Read a folder of peft. Raises AdapterError for one that does not fit."""
        given = read_adapter(folder, name, self.layout, most_bytes)
        n_parts = sum(self.n_parts.values())
        table = np.zeros((n_parts, TABLE_NUMBERS), dtype=np.int64)
        matrices: list[NDArray[np.uint16]] = []
        for layer_name, layer in self.layout.layers.items():
            place = self.places[layer_name]
            for i, part in enumerate(layer.parts, place.first):
                if (low := given.modules.get(part.module)) is None:
                    continue
                outputs = layer.outputs[part.first : part.first + len(part.rows)] * low.scaling
                most = len(layer.inputs) + len(layer.outputs)  # operators take no more
                if (rank := len(low.a)) > most:
                    raise refuse(name, f"r of {part.module}", str(rank), f"at most {most}")
                a = _columns(low, layer.inputs, is_mixed=place.is_mixed)
                first, b = _panels(part.first, low.b[part.rows] * outputs[:, None])
                if not all(np.abs(matrix).max() <= _LARGEST for matrix in (a, b)):
                    raise AdapterError(
                        f"adapter {name!r}: {part.module} is too large once the model's factors "
                        "are in it; expected numbers that fit bfloat16"
                    )
                pair = _upper(a), _upper(b)
                matrices += pair
                addresses = (matrix.ctypes.data for matrix in pair)
                width = part.first - first + len(part.rows)
                table[i] = [*addresses, b.shape[1], first, width, 1]
        n_bytes = sum(matrix.nbytes for matrix in matrices)
        return Adapter(name, given.digest, given.base, table, n_bytes, tuple(matrices))

    def inputs(
        self, adapters: Sequence[Adapter | None], counts: NDArray[np.int64]
    ) -> dict[str, NDArray[np.int64]]:
        """Return the graph's inputs of a run of sequences, of so many tokens each.

        No entries are no adapters, which takes the operators no time.
        """
        used = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        places = {adapter: i for i, adapter in enumerate(used)}
        index = [-1 if adapter is None else places[adapter] for adapter in adapters]
        if not used:
            none = np.zeros((0, sum(self.n_parts.values()), TABLE_NUMBERS), dtype=np.int64)
            return {ADAPTERS: none.ravel(), TABLE: none}
        table = np.stack([adapter.table for adapter in used])
        return {ADAPTERS: np.repeat(np.array(index, dtype=np.int64), counts), TABLE: table}


def _columns(low: Factors, inputs: NDArray[np.float32], *, is_mixed: bool) -> NDArray[np.float32]:
    """Return A [n_in, rank padded] of inputs as the product reads them."""
    rank, n_in = low.a.shape
    a = low.a * inputs
    if is_mixed:  # W x = (W H / 8) (H x)
        parts = a.reshape(rank, 2, 2, 2, -1)
        for axis in (1, 2, 3):  # a product with HADAMARD would round as this CPU's library does
            one, other = np.split(parts, 2, axis)
            parts = np.concatenate((one + other, one - other), axis)
        a = parts.reshape(rank, n_in) / np.float32(len(HADAMARD))
    padded = np.zeros((n_in, -(-rank // LANES) * LANES), dtype=np.float32)
    padded[:, :rank] = a.T
    return padded


def _panels(first: int, b: NDArray[np.float32]) -> tuple[int, NDArray[np.float32]]:
    """Return the first output of whole panels, and B [n_out, rank] as [panels, rank, LANES].

    Outputs of padding get zeros, so nothing is added to them.
    """
    before = first % LANES
    padded = np.zeros((-(-(before + len(b)) // LANES) * LANES, b.shape[1]), dtype=np.float32)
    padded[before : before + len(b)] = b
    panels = padded.reshape(-1, LANES, b.shape[1]).transpose(0, 2, 1)
    return first - before, np.ascontiguousarray(panels)


def _upper(matrix: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper 16 bits of floats, rounded to the nearest, ties to even."""
    bits = matrix.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
