"""An adapter in memory: matrices with the graph's factors, and their addresses.

Memory lives as long as something refers to the adapter: its sequences, and the run that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.adapter_table import ADAPTERS, HADAMARD, LANES, TABLE, TABLE_NUMBERS
from kvasir.model.adapters.config import AdapterError, refuse
from kvasir.model.adapters.layout import Layout, Part
from kvasir.model.adapters.peft import Factors, read_adapter

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvasir.kernels.library import Library

_ENCODER = "encoder."  # begins the names of layers in an encoder-decoder's graph of sources
_LARGEST = np.float32((2 - 2**-7) * 2.0**127)  # of 16 bits; larger ones may become infinite


class NoAdaptersError(ValueError):
    """A model that takes no adapters."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter. table: int64 [parts of the graph, TABLE_NUMBERS].

    digest: of its content. base: the model that it names. matrices: of layers, whose addresses the
    table has. graph: that it was loaded for.
    """

    name: str
    digest: bytes
    base: str | None
    table: NDArray[np.int64]
    matrices: Mapping[str, Sequence[NDArray[Any]]]
    graph: GraphAdapters

    @property
    def n_bytes(self) -> int:
        """The size of its matrices."""
        return sum(matrix.nbytes for each in self.matrices.values() for matrix in each)


@dataclass(frozen=True)
class GraphAdapters:
    """Adapters as a model's graphs read them: the layout, and which layers' inputs are mixed.

    library: of the products that read them. Matrices keep the upper 16 bits of their numbers,
    rounded.
    """

    layout: Layout
    library: Library | None = None
    mixed: dict[str, bool] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Each layer's first part in the table, and their number."""
        counts = [len(layer.parts) for layer in self.layout.layers.values()]
        firsts = accumulate(counts, initial=0)
        return dict(zip(self.layout.layers, zip(firsts, counts, strict=False), strict=True))

    def attach(self, model: ModelProto, *, of_sources: bool = False) -> None:
        """Let a graph read adapters, before a session opens it.

        of_sources: it is an encoder-decoder's encoder. Raises NoAdaptersError.
        """
        from kvasir.kernels.graph import Mismatch  # noqa: PLC0415  imports onnx

        own = (name for name in self.layout.layers if name.startswith(_ENCODER) is of_sources)
        try:
            self._add(model, {name.removeprefix(_ENCODER): name for name in own})
        except Mismatch as mismatch:
            raise NoAdaptersError(f"its graph takes no adapters: {mismatch}") from None

    def _add(self, model: ModelProto, names: Mapping[str, str]) -> None:
        """Add adapters to a graph; names: of layers, by those of its weights."""
        from kvasir.kernels.adapt import add_adapters  # noqa: PLC0415  imports onnx

        parts = {own: self.parts[name] for own, name in names.items()}
        layers = {own: self.layout.layers[name] for own, name in names.items()}
        sizes = {own: (len(layer.inputs), len(layer.outputs)) for own, layer in layers.items()}
        mixed = add_adapters(model, parts, sizes)
        self.mixed.update({names[own]: is_mixed for own, is_mixed in mixed.items()})

    def load(self, folder: Path, name: str, most_bytes: int) -> Adapter:
        """Read a folder of peft. Raises AdapterError for one that does not fit."""
        given = read_adapter(folder, name, self.layout, most_bytes)
        table = np.zeros((sum(n for _, n in self.parts.values()), TABLE_NUMBERS), dtype=np.int64)
        matrices = defaultdict[str, list[NDArray[Any]]](list)
        for layer, i, part, low_a, low_b in self._parts_of(name, given.modules):
            a = _columns(low_a, is_mixed=self.mixed.get(layer, False))
            first, b = _panels(part.first, low_b)
            if not all(np.abs(matrix).max() <= _LARGEST for matrix in (a, b)):
                raise AdapterError(
                    f"adapter {name!r}: {part.module} is too large once the model's factors "
                    "are in it; expected numbers that fit bfloat16"
                )
            pair = _upper(a), _upper(b)
            matrices[layer] += pair
            addresses = (matrix.ctypes.data for matrix in pair)
            width = part.first - first + len(part.rows)
            table[self.parts[layer][0] + i] = [*addresses, b.shape[1], first, width, 1]
        return Adapter(name, given.digest, given.base, table, matrices, self)

    def of_another_graph(self) -> Self:
        """Return the same for another graph of the model, for which `fitted` makes adapters."""
        return type(self)(self.layout, self.library)

    def fitted(self, adapter: Adapter) -> Adapter:
        """Return an adapter that was loaded for another graph of the model, for this one.

        In 4 bits only the products of prompts over floats mix their inputs.
        """
        table, matrices = adapter.table.copy(), {**adapter.matrices}
        for layer, is_mixed in self.mixed.items():
            if not is_mixed or adapter.graph.mixed[layer]:
                continue
            for i, a in enumerate(matrices.get(layer, ())[::2]):  # uint16 [n_in, rank padded]
                floats = (a.astype(np.uint32) << 16).view(np.float32)
                mixed = _upper(_columns(floats.T, is_mixed=True))
                table[table[:, 0] == a.ctypes.data, 0] = mixed.ctypes.data
                matrices[f"{layer}.{i}"] = [mixed]
        return replace(adapter, table=table, matrices=matrices)

    def _parts_of(
        self, name: str, modules: Mapping[str, Factors]
    ) -> Iterator[tuple[str, int, Part, NDArray[np.float32], NDArray[np.float32]]]:
        """Yield parts that an adapter has, with their layers and their places in these.

        And with A [rank, n_in] and B [outputs, rank], which have the graph's factors. Raises
        AdapterError for a rank that operators do not take.
        """
        for layer_name, layer in self.layout.layers.items():
            for i, part in enumerate(layer.parts):
                if (low := modules.get(part.module)) is None:
                    continue
                outputs = layer.outputs[part.first : part.first + len(part.rows)] * low.scaling
                most = len(layer.inputs) + len(layer.outputs)
                if (rank := len(low.a)) > most:
                    raise refuse(name, f"r of {part.module}", str(rank), f"at most {most}")
                sleep(0)  # as in read_adapter
                yield layer_name, i, part, low.a * layer.inputs, low.b[part.rows] * outputs[:, None]

    def inputs(
        self, adapters: Sequence[Adapter | None], counts: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs of a run of sequences.

        counts: of their packed tokens; None of rows, which have as many each. No entries are no
        adapters, which takes the operators no time.
        """
        used, index = numbered(adapters)
        if not used:
            n_parts = sum(n for _, n in self.parts.values())
            none = np.zeros((0, n_parts, TABLE_NUMBERS), dtype=np.int64)
            return {ADAPTERS: none.ravel(), TABLE: none}
        entries = np.repeat(index, 1 if counts is None else counts)
        return {ADAPTERS: entries, TABLE: np.stack([adapter.table for adapter in used])}


def numbered(adapters: Sequence[Adapter | None]) -> tuple[list[Adapter], NDArray[np.int64]]:
    """Return different adapters, and the place of each sequence's among them; -1 is none."""
    used = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
    places: dict[Adapter | None, int] = {adapter: i for i, adapter in enumerate(used)}
    return used, np.array([places.get(adapter, -1) for adapter in adapters], dtype=np.int64)


def _columns(a: NDArray[np.float32], *, is_mixed: bool) -> NDArray[np.float32]:
    """Return A [n_in, rank padded], of A [rank, n_in], for inputs as the product reads them."""
    rank, n_in = a.shape
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
