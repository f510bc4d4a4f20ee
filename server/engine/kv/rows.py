"""Rows of keys and values on the CPU: addresses, reservation, compaction.

A prompt is computed on a row of floats, one of few; a running sequence has a row of the model's own type, int8 or
float32, which is filled as its prompt is computed. So prompts attend to exact keys and values, and decoding reads a
quarter of the bytes.

Address space is reserved for the worst case; the operating system commits a page when a token is first written to it:
the page table is the block table (the idea of vAttention, arXiv 2405.04437). How much may be promised at once is the
budget, kept here too, in tokens of running rows: a prompt's token on a row of floats counts for four of int8.
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
        self,
        *,
        n_layer: int,
        n_kv_head: int,
        head_dim: int,
        n_rows: int,
        max_model_len: int,
        dtype: type[Any],
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.promised = [0] * n_rows  # tokens that a row's holder may write
        self.warm = [0] * n_rows  # tokens whose pages a row still holds from before
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

    @property
    def n_committed(self) -> int:
        """Tokens that have memory, or may take it at any time."""
        return sum(map(max, self.promised, self.warm))

    def release(self, row: int) -> None:
        """Take a row's promise back; its pages stay."""
        self.warm[row] = max(self.warm[row], self.promised[row])
        self.promised[row] = 0

    def cool(self, row: int, n_kept: int = 0) -> int:
        """Return what a row holds beyond its promise and its first `n_kept` tokens, and how many tokens that is."""
        n_kept = max(n_kept, self.promised[row])
        n_returned = max(0, self.warm[row] - n_kept)
        if n_returned:
            self.give_back(row, n_kept)
            self.warm[row] = n_kept
        return n_returned

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
                first, end = (
                    -(-first // mmap.PAGESIZE),
                    (start + (head + 1) * head_bytes) // mmap.PAGESIZE,
                )
                if first < end:
                    self._memory.madvise(
                        mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE
                    )

    def _offset(self, block: int, row: int) -> int:
        return (block * self._n_rows + row) * self._row_bytes


class KVRows:
    """`max_num_seqs` rows of up to `max_model_len` tokens, and rows for prompts, within one budget.

    budget_tokens: most tokens that have memory at once; one of a prompt's row counts as `prompt_weight`. dtype: of
    running sequences' rows, float32 or int8. A row that has been allocated has a prompt row too, until `end_prompt`.
    """

    runs_apart = (
        True  # a chunk of a prompt may be a run of its own, and what prompts share is copied
    )

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
        shape = {
            "n_layer": n_layer,
            "n_kv_head": n_kv_head,
            "head_dim": head_dim,
            "max_model_len": max_model_len,
        }
        n_prompts = min(max_num_seqs, MOST_PROMPTS)
        self.running = RowMemory(**shape, n_rows=max_num_seqs, dtype=dtype)
        self.prompts = RowMemory(**shape, n_rows=n_prompts, dtype=np.float32)
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.prompt_weight = self.prompts.dtype.itemsize // self.running.dtype.itemsize
        self.prompt_token_bytes = self.bytes_per_token(n_layer, n_kv_head, head_dim)
        self._free = set(range(max_num_seqs))
        self._free_prompts = set(range(n_prompts))
        self._prompt_rows: dict[int, int] = {}  # by row

    @staticmethod
    def bytes_per_token(n_layer: int, n_kv_head: int, head_dim: int, itemsize: int = 4) -> int:
        return 2 * n_layer * n_kv_head * head_dim * itemsize

    @property
    def token_bytes(self) -> int:
        """Of a running sequence's token, in all layers."""
        return self.prompt_token_bytes // self.prompt_weight

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def reserved_tokens(self) -> int:
        """What is promised of the budget."""
        return sum(self.running.promised) + self.prompt_weight * sum(self.prompts.promised)

    @property
    def committed_tokens(self) -> int:
        """What is promised of the budget, and what free rows still hold."""
        return self.running.n_committed + self.prompt_weight * self.prompts.n_committed

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """What a sequence takes of the budget while its prompt is computed, which is when it takes most."""
        return n_prompt + max_tokens + self.prompt_weight * n_prompt

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

    def allocate(self, n_prompt: int, max_tokens: int = 0) -> int | None:
        """The lowest free row, for a prompt and new tokens; None when no row is free or the budget is spent."""
        n_needed = self.n_needed(n_prompt, max_tokens)
        if (
            not self._free
            or not self._free_prompts
            or self.reserved_tokens + n_needed > self.budget_tokens
        ):
            return None
        row, prompt_row = min(self._free), min(self._free_prompts)
        self._free.remove(row)
        self._free_prompts.remove(prompt_row)
        self._prompt_rows[row] = prompt_row
        self.running.promised[row] = n_prompt + max_tokens
        self.prompts.promised[prompt_row] = n_prompt
        self._keep_to_budget()
        return row

    def pad(self, prompt_rows: list[int], n_tokens: int) -> bool:
        """Promise each of these rows `n_tokens`, for a run that pads its prompts; False when the budget has no room."""
        n_missing = sum(max(0, n_tokens - self.prompts.promised[row]) for row in prompt_rows)
        if self.reserved_tokens + self.prompt_weight * n_missing > self.budget_tokens:
            return False
        for row in prompt_rows:
            self.prompts.promised[row] = max(n_tokens, self.prompts.promised[row])
        self._keep_to_budget()
        return True

    def end_prompt(self, row: int) -> None:
        """A prompt is computed, and its row filled: let another have the row of floats, and its promise."""
        prompt_row = self._prompt_rows.pop(row)
        self._free_prompts.add(prompt_row)
        self.prompts.release(prompt_row)
        self.prompts.cool(prompt_row, _WARM_PROMPT)

    def free(self, row: int) -> None:
        """Take the row's promise back. Its pages stay, as far as the budget goes, so that the next sequence finds them.

        To commit a page again costs more than to overwrite it: 4 % of a prefill.
        """
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        if row in self._prompt_rows:
            self.end_prompt(row)
        self._free.add(row)
        self.running.release(row)

    def give_back(self) -> None:
        """Return the pages of all free rows to the operating system, those that only a hole was written to included."""
        for memory, free in ((self.running, self._free), (self.prompts, self._free_prompts)):
            for row in free:
                memory.give_back(row)
                memory.warm[row] = 0

    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row's first `n_tokens` tokens, and its promise, to the lowest free row, which is returned.

        None when the budget has no room for the tokens in both rows, which hold them while they are copied.
        """
        if self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        target = min(self._free)
        self._free.remove(target)
        self.running.promised[target] = n_tokens
        self._keep_to_budget()
        tokens = self.running.array[:, :, :, :n_tokens]
        tokens[:, target] = tokens[:, source]
        if source in self._prompt_rows:
            self._prompt_rows[target] = self._prompt_rows.pop(source)
        self.running.promised[target] = self.running.promised[source]
        self.running.release(source)
        self._free.add(source)
        self._keep_to_budget()
        return target

    def _keep_to_budget(self) -> None:
        """Return pages beyond what is promised until all fits: those of free rows first, the highest first.

        Those of prompts come last: they are few, and the next prompt has a use for them.
        """
        excess = self.committed_tokens - self.budget_tokens
        for row in sorted(
            range(self.max_num_seqs), key=lambda r: (r in self._free, r), reverse=True
        ):
            if excess <= 0:
                return
            excess -= self.running.cool(row)
        for prompt_row in reversed(range(len(self.prompts.warm))):
            if excess <= 0:
                return
            excess -= self.prompt_weight * self.prompts.cool(prompt_row)


def _reserve(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
