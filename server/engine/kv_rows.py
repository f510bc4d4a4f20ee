"""Rows of keys and values on the CPU: addresses, reservation, compaction.

One private anonymous mapping holds, for every layer, a block of keys and a block of values, each
[max_num_seqs, n_kv_head, n_positions, head_dim]. Address space is reserved for the worst case; the operating system
commits a page when a token is first written to it, and gets it back when the row is freed: the page table is the block
table (the idea of vAttention, arXiv 2405.04437). How many tokens may be promised at once is the budget, kept here too.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it
_ITEM = 4  # bytes of a float32
_MOVED_AT_ONCE = 64  # tokens; the copy between two rows stays in the processor's cache


class KVRows:
    """`max_num_seqs` rows of up to `max_model_len` tokens, of which at most `budget_tokens` are promised at once.

    `n_positions` is max_model_len rounded up so that a row of one block is a whole number of pages: giving a row back
    then leaves its neighbour alone.
    """

    def __init__(
        self, *, n_layer: int, n_kv_head: int, head_dim: int, max_num_seqs: int, max_model_len: int, budget_tokens: int
    ) -> None:
        per_position = n_kv_head * head_dim * _ITEM
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, per_position)
        self.n_positions = math.ceil(max_model_len / step) * step
        self.n_layer = n_layer
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.reserved_tokens = 0
        self.row_shape = (n_kv_head, self.n_positions, head_dim)
        self.token_bytes = self.bytes_per_token(n_layer, n_kv_head, head_dim)
        self._row_bytes = per_position * self.n_positions
        self._block_bytes = self._row_bytes * max_num_seqs
        self._free = set(range(max_num_seqs))
        self._promised = [0] * max_num_seqs
        self._warm = [0] * max_num_seqs  # tokens whose pages a row still holds from before
        self._memory = _reserve(2 * n_layer * self._block_bytes)
        whole = np.frombuffer(self._memory, dtype=np.float32)
        self._array = whole.reshape(2 * n_layer, max_num_seqs, *self.row_shape)  # [block, row, *row_shape]
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @staticmethod
    def bytes_per_token(n_layer: int, n_kv_head: int, head_dim: int) -> int:
        return 2 * n_layer * n_kv_head * head_dim * _ITEM

    @property
    def n_free(self) -> int:
        return len(self._free)

    def address(self, block: int, row: int) -> int:
        """Where row `row` of block `block` starts; block 2i holds layer i's keys, block 2i + 1 its values."""
        return self._base + block * self._block_bytes + row * self._row_bytes

    def view(self, block: int, row: int) -> NDArray[np.float32]:
        """The row as an array [n_kv_head, n_positions, head_dim] over the same memory."""
        view: NDArray[np.float32] = self._array[block, row]
        return view

    def read(self, row: int, start: int, stop: int, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """A copy of tokens [start, stop) of a row, in every block: [2 * n_layer, n_kv_head, stop - start, head_dim].

        It goes into `out` where that is given: memory that has been used before costs no page faults.
        """
        tokens = self._array[:, row, :, start:stop]
        if out is None:
            return tokens.copy()
        np.copyto(out, tokens)
        return out

    def write(self, row: int, start: int, tokens: NDArray[np.float32]) -> None:
        """Put what `read` has returned into a row, from position `start` on."""
        self._array[:, row, :, start : start + tokens.shape[2]] = tokens

    def allocate(self, n_tokens: int) -> int | None:
        """The lowest free row with `n_tokens` promised to it; None when no row is free or the budget is spent."""
        if not self.n_free or self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        row = min(self._free)
        self._free.remove(row)
        self._promised[row] = n_tokens
        self.reserved_tokens += n_tokens
        for other in sorted(range(self.max_num_seqs), key=lambda r: (r in self._free, r), reverse=True):
            if sum(map(max, self._promised, self._warm)) <= self.budget_tokens:
                break
            self._give_back(other)
        return row

    def free(self, row: int) -> None:
        """Take the row's promise back. Its pages stay, as far as the budget goes, so that the next sequence finds them.

        To commit a page again costs more than to overwrite it: 4 % of a prefill.
        """
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        self._free.add(row)
        self.reserved_tokens -= self._promised[row]
        self._warm[row] = max(self._warm[row], self._promised[row])
        self._promised[row] = 0

    def give_back(self) -> None:
        """Return the pages of all free rows to the operating system."""
        for row in self._free:
            self._give_back(row)

    def move(self, source: int, n_tokens: int) -> int:
        """Move a row's first `n_tokens` tokens, and its promise, to the lowest free row, which is returned."""
        target = min(self._free)
        for start in range(0, n_tokens, _MOVED_AT_ONCE):
            self.write(target, start, self.read(source, start, min(start + _MOVED_AT_ONCE, n_tokens)))
        self._free.remove(target)
        self._free.add(source)
        self._promised[target], self._promised[source] = self._promised[source], 0
        self._warm[source] = max(self._warm[source], self._promised[target])
        return target

    def _give_back(self, row: int) -> None:
        """Return what a row holds beyond its promise."""
        n_warm, self._warm[row] = self._warm[row], 0
        n_kept = self._promised[row]
        if n_warm <= n_kept or sys.platform != "linux":
            return
        n_head, n_positions, _ = self.row_shape
        head_bytes = self._row_bytes // n_head
        for block in range(2 * self.n_layer):
            start = block * self._block_bytes + row * self._row_bytes
            if not n_kept:
                self._memory.madvise(mmap.MADV_DONTNEED, start, self._row_bytes)
                continue
            for head in range(n_head):
                first = start + head * head_bytes + n_kept * head_bytes // n_positions
                first, end = -(-first // mmap.PAGESIZE), (start + (head + 1) * head_bytes) // mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


def _reserve(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
