"""Rows of virtual memory for keys and values.

Address space is reserved for the worst case; the operating system commits a page when a token is
first written to it: the page table is the block table (the idea of vAttention, arXiv 2405.04437).
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it


class KVShape(NamedTuple):
    """The shape of a model's keys and values; shared: a layer's values are its keys.

    states: the shapes of what recurrent layers keep of a row, whatever its length.
    """

    n_layer: int
    n_kv_head: int
    head_dim: int
    shared: bool = False
    states: tuple[tuple[int, ...], ...] = ()

    @property
    def n_parts(self) -> int:
        """The arrays of a layer: its keys and its values, or one that is both."""
        return 1 if self.shared else 2

    def token_bytes(self, itemsize: int = 4) -> int:
        """Return the size of one token's keys and values in all layers.

        It is at least 1, for a model without any to have a budget of tokens, too.
        """
        return max(1, self.n_parts * self.n_layer * self.n_kv_head * self.head_dim * itemsize)

    @property
    def state_bytes(self) -> int:
        """The size of a row's states, which are float32."""
        return 4 * sum(map(math.prod, self.states))


class RowMemory:
    """`n_rows` rows of `max_model_len` positions in one private anonymous mapping.

    array: [2 * n_layer, n_rows, n_kv_head, n_positions, head_dim]; block 2i holds layer i's keys,
    block 2i + 1 its values. Where these are the same it is [n_layer, …]. n_positions is
    max_model_len rounded up to whole pages, so that releasing a row leaves its neighbour alone.
    reserved: tokens that the holder of each row may write, 0 of a free one. committed: tokens whose
    pages each row holds, or may take at any time. weight: tokens of a budget that each of these
    takes. states: of recurrent layers, float32 [n_rows, …] each, beside the budget.
    """

    def __init__(
        self,
        shape: KVShape,
        n_rows: int,
        max_model_len: int,
        dtype: type[Any] = np.float32,
        weight: int = 1,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.weight = weight
        self.reserved = [0] * n_rows
        self.committed = [0] * n_rows
        per_position = shape.n_kv_head * shape.head_dim * self.dtype.itemsize
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, per_position)
        self.n_positions = math.ceil(max_model_len / step) * step
        self.row_shape = (shape.n_kv_head, self.n_positions, shape.head_dim)
        self.n_parts = shape.n_parts
        n_blocks = self.n_parts * shape.n_layer
        self._row_bytes = per_position * self.n_positions
        size = n_blocks * n_rows * self._row_bytes
        self._memory = map_memory(max(size, mmap.PAGESIZE))  # of nothing there is no mapping
        count = size // self.dtype.itemsize
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype=self.dtype, count=count)
        self.array = self.array.reshape(n_blocks, n_rows, *self.row_shape)
        self.states: list[NDArray[np.float32]] = [
            np.zeros((n_rows, *of_row), dtype=np.float32) for of_row in shape.states
        ]

    def address(self, block: int, row: int) -> int:
        """Return the address of a row's keys, block 2i of layer i, or values, block 2i + 1."""
        address: int = self.array[block * self.n_parts // 2, row].ctypes.data
        return address

    def reserve(self, row: int, n_tokens: int) -> None:
        """Change a row's reservation; its pages stay if it shrinks."""
        self.reserved[row] = n_tokens
        self.committed[row] = max(self.committed[row], n_tokens)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy a row's tokens [start, end) to another row, and its states."""
        tokens = self.array[:, :, :, start:end]
        tokens[:, target] = tokens[:, source]
        for state in self.states:
            state[target] = state[source]

    def read_states(self, row: int) -> NDArray[np.float32]:
        """Return a copy of a row's states, one after the other."""
        return np.concatenate([state[row].ravel() for state in self.states])

    def write_states(self, row: int, values: NDArray[np.float32] | None) -> None:
        """Set a row's states to what `read_states` returned; None is those of no tokens."""
        start = 0
        for state in self.states:
            end = start + state[row].size
            state[row] = 0.0 if values is None else values[start:end].reshape(state[row].shape)
            start = end

    def trim(self, row: int, n_kept: int = 0) -> int:
        """Release a row's pages beyond its reservation and its first `n_kept` tokens.

        Returns the number of tokens whose pages are released.
        """
        n_kept = max(n_kept, self.reserved[row])
        n_released = max(0, self.committed[row] - n_kept)
        if n_released:
            self.release_pages(row, n_kept)
        return n_released

    def release_pages(self, row: int, n_kept: int = 0) -> None:
        """Return a row's pages to the operating system, except those of its first tokens."""
        self.committed[row] = n_kept
        if sys.platform != "linux":
            return
        n_parts = self.row_shape[0] if n_kept else 1  # each head has kept tokens of its own
        row_bytes = self._row_bytes
        size = row_bytes // n_parts
        for block in range(len(self.array)):
            for part in range(n_parts):
                start = (block * len(self.reserved) + row) * row_bytes + part * size
                kept = start + n_kept * size // self.n_positions
                first = math.ceil(kept / mmap.PAGESIZE) * mmap.PAGESIZE
                end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)


def map_memory(size: int) -> mmap.mmap:
    """Return zero bytes, whose pages the operating system commits when they are first written."""
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
