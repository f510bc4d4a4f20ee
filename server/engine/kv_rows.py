"""Rows of keys and values on the CPU: addresses, reservation, compaction.

A prompt is computed on a row of floats, one of few; a running sequence has a row of the model's own type, int8 or
float32, which is filled as its prompt is computed. So prompts attend to exact keys and values, and decoding reads a
quarter of the bytes.

Address space is reserved for the worst case; the operating system commits a page when a token is first written to it:
the page table is the block table (the idea of vAttention, arXiv 2405.04437). How many tokens may be promised at once is
the budget, kept here too.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_PROMPTS = 8  # that are computed in one step
_WARM_PROMPT = 1024  # tokens of a finished prompt whose pages are kept for the next one
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it

Floats = NDArray[np.float32]


class RowMemory:
    """`n_rows` rows of `max_model_len` positions in one private anonymous mapping.

    For every layer there is a block of keys and a block of values: block 2i holds layer i's keys, block 2i + 1 its
    values. `array` is [2 * n_layer, n_rows, n_kv_head, n_positions, head_dim]; n_positions is max_model_len rounded up
    so that a row of one block is a whole number of pages: giving a row back then leaves its neighbour alone.
    """

    def __init__(
        self, *, n_layer: int, n_kv_head: int, head_dim: int, n_rows: int, max_model_len: int, dtype: type[Any]
    ) -> None:
        self.dtype = np.dtype(dtype)
        per_position = n_kv_head * head_dim * self.dtype.itemsize
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, per_position)
        self.n_positions = math.ceil(max_model_len / step) * step
        self.row_shape = (n_kv_head, self.n_positions, head_dim)
        self._n_rows = n_rows
        self._row_bytes = per_position * self.n_positions
        self._memory = _reserve(2 * n_layer * n_rows * self._row_bytes)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype=self.dtype)
        self.array = self.array.reshape(2 * n_layer, n_rows, *self.row_shape)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def address(self, block: int, row: int) -> int:
        """Where row `row` of block `block` starts."""
        return self._base + self._offset(block, row)

    def give_back(self, row: int, n_kept: int = 0) -> None:
        """Return a row's pages to the operating system, but for those of its first `n_kept` tokens."""
        if sys.platform != "linux":
            return
        n_head, n_positions, _ = self.row_shape
        head_bytes = self._row_bytes // n_head
        for block in range(len(self.array)):
            start = self._offset(block, row)
            if not n_kept:
                self._memory.madvise(mmap.MADV_DONTNEED, start, self._row_bytes)
                continue
            for head in range(n_head):
                first = start + head * head_bytes + n_kept * head_bytes // n_positions
                first, end = -(-first // mmap.PAGESIZE), (start + (head + 1) * head_bytes) // mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)

    def _offset(self, block: int, row: int) -> int:
        return (block * self._n_rows + row) * self._row_bytes


class KVRows:
    """`max_num_seqs` rows of up to `max_model_len` tokens, of which at most `budget_tokens` are promised at once.

    dtype: of running sequences' rows, float32 or int8. A row that has been allocated has a prompt row too, until
    `end_prompt`.
    """

    def __init__(
        self,
        *,
        n_layer: int,
        n_kv_head: int,
        head_dim: int,
        max_num_seqs: int,
        max_model_len: int,
        budget_tokens: int,
        dtype: type[Any] = np.float32,
    ) -> None:
        shape = {"n_layer": n_layer, "n_kv_head": n_kv_head, "head_dim": head_dim, "max_model_len": max_model_len}
        n_prompts = min(max_num_seqs, MOST_PROMPTS)
        self.running = RowMemory(**shape, n_rows=max_num_seqs, dtype=dtype)
        self.prompts = RowMemory(**shape, n_rows=n_prompts, dtype=np.float32)
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.reserved_tokens = 0
        self.prompt_token_bytes = self.bytes_per_token(n_layer, n_kv_head, head_dim)
        self._free = set(range(max_num_seqs))
        self._free_prompts = set(range(n_prompts))
        self._prompt_rows: dict[int, int] = {}  # by row
        self._promised = [0] * max_num_seqs
        self._warm = [0] * max_num_seqs  # tokens whose pages a row still holds from before

    @staticmethod
    def bytes_per_token(n_layer: int, n_kv_head: int, head_dim: int, itemsize: int = 4) -> int:
        return 2 * n_layer * n_kv_head * head_dim * itemsize

    @property
    def n_free(self) -> int:
        return len(self._free)

    def prompt_row(self, row: int) -> int:
        """Which row of `prompts` belongs to a row. Raises KeyError once its prompt has ended."""
        return self._prompt_rows[row]

    def read(self, row: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """A copy of a prompt's tokens [start, stop), in every block: [2 * n_layer, n_kv_head, stop - start, head_dim].

        It goes into `out` where that is given: memory that has been used before costs no page faults.
        """
        tokens = self.prompts.array[:, self._prompt_rows[row], :, start:stop]
        if out is None:
            return tokens.copy()
        np.copyto(out, tokens)
        return out

    def write(self, row: int, start: int, tokens: Floats) -> None:
        """Put what `read` has returned into a prompt's row, from position `start` on."""
        self.prompts.array[:, self._prompt_rows[row], :, start : start + tokens.shape[2]] = tokens

    def fill(self, row: int, start: int, stop: int) -> None:
        """Copy a prompt's tokens [start, stop) to the row that its sequence will run on, rounded to its type."""
        source = self.prompts.array[:, self._prompt_rows[row], :, start:stop]
        target = self.running.array[:, row, :, start:stop]
        if target.dtype == source.dtype:
            target[:] = source
            return
        for tokens, rounded in zip(source, target, strict=True):  # a block at a time, in the cache
            whole = np.rint(tokens)
            np.clip(whole, -127, 127, out=whole)
            with np.errstate(invalid="ignore"):  # what is no number shows in the logits
                np.copyto(rounded, whole, casting="unsafe")

    def allocate(self, n_tokens: int) -> int | None:
        """The lowest free row with `n_tokens` promised to it; None when no row is free or the budget is spent."""
        if not self._free or not self._free_prompts or self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        row = min(self._free)
        self._free.remove(row)
        self._prompt_rows[row] = min(self._free_prompts)
        self._free_prompts.remove(self._prompt_rows[row])
        self._promised[row] = n_tokens
        self.reserved_tokens += n_tokens
        for other in sorted(range(len(self._warm)), key=lambda r: (r in self._free, r), reverse=True):
            if sum(map(max, self._promised, self._warm)) <= self.budget_tokens:
                break
            self._cool(other)
        return row

    def end_prompt(self, row: int, n_tokens: int) -> None:
        """A prompt of `n_tokens` is computed, and its row filled: let another have the row of floats."""
        prompt_row = self._prompt_rows.pop(row)
        self._free_prompts.add(prompt_row)
        if n_tokens > _WARM_PROMPT:
            self.prompts.give_back(prompt_row, _WARM_PROMPT)

    def free(self, row: int) -> None:
        """Take the row's promise back. Its pages stay, as far as the budget goes, so that the next sequence finds them.

        To commit a page again costs more than to overwrite it: 4 % of a prefill.
        """
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        if row in self._prompt_rows:
            self.end_prompt(row, self.prompts.n_positions)
        self._free.add(row)
        self.reserved_tokens -= self._promised[row]
        self._warm[row] = max(self._warm[row], self._promised[row])
        self._promised[row] = 0

    def give_back(self) -> None:
        """Return the pages of all free rows to the operating system."""
        for row in self._free:
            self._cool(row)
        for row in self._free_prompts:
            self.prompts.give_back(row)

    def move(self, source: int, n_tokens: int) -> int:
        """Move a row's first `n_tokens` tokens, and its promise, to the lowest free row, which is returned."""
        target = min(self._free)
        tokens = self.running.array[:, :, :, :n_tokens]
        tokens[:, target] = tokens[:, source]
        if source in self._prompt_rows:
            self._prompt_rows[target] = self._prompt_rows.pop(source)
        self._free.remove(target)
        self._free.add(source)
        self._promised[target], self._promised[source] = self._promised[source], 0
        self._warm[source] = max(self._warm[source], self._promised[target])
        return target

    def _cool(self, row: int) -> None:
        """Return what a row holds beyond its promise."""
        if self._warm[row] > self._promised[row]:
            self.running.give_back(row, self._promised[row])
        self._warm[row] = 0


def _reserve(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
