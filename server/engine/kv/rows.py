"""KV cache rows on the CPU: address space, reservation, compaction.

A prompt is computed on one of a few rows of floats. A running sequence has a row of the model's own
type, int8 or float32, which is filled while its prompt is computed. Prompts thus attend to exact
keys and values, and decoding reads a quarter of the bytes.

Address space is reserved for the worst case; the operating system commits a page when a token is
first written to it: the page table is the block table (the idea of vAttention, arXiv 2405.04437).
The budget bounds what may be committed, in tokens of running rows: a prompt's token on a row of
floats counts as four of int8.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.kv.prefix_cache import PrefixCache
from server.engine.kv.store import name_blocks

MAX_PROMPT_ROWS = 8
MAX_CHUNKS_PER_STEP = 8  # each may be a run of its own, which reads every weight
COPIED_PER_COMPUTED = 16  # tokens copied in the time of running one; 20 to 60 were measured
_RETAINED_PROMPT = 1024  # tokens of a finished prompt whose pages are kept for the next one
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it

Floats = NDArray[np.float32]


class RowMemory:
    """`n_rows` rows of `max_model_len` positions in one private anonymous mapping.

    Block 2i holds layer i's keys, block 2i + 1 its values. `array` is
    [2 * n_layer, n_rows, n_kv_head, n_positions, head_dim]; n_positions is max_model_len rounded up
    so that one block's row is a whole number of pages: releasing a row leaves its neighbour alone.

    reserved: tokens that the holder of each row may write. resident: tokens whose pages each row
    still holds from earlier holders.
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
        self.reserved = [0] * n_rows
        self.resident = [0] * n_rows
        per_position = n_kv_head * head_dim * self.dtype.itemsize
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, per_position)
        self.n_positions = math.ceil(max_model_len / step) * step
        self.row_shape = (n_kv_head, self.n_positions, head_dim)
        self._n_rows = n_rows
        self._row_bytes = per_position * self.n_positions
        self._memory = _map_memory(2 * n_layer * n_rows * self._row_bytes)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype=self.dtype)
        self.array = self.array.reshape(2 * n_layer, n_rows, *self.row_shape)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def address(self, block: int, row: int) -> int:
        """Return the address of row `row` of block `block`."""
        return self._base + self._offset(block, row)

    @property
    def committed_tokens(self) -> int:
        """Tokens that have memory, or may take it at any time."""
        return sum(map(max, self.reserved, self.resident))

    def unreserve(self, row: int) -> None:
        """Cancel a row's reservation; its pages stay."""
        self.resident[row] = max(self.resident[row], self.reserved[row])
        self.reserved[row] = 0

    def trim(self, row: int, n_kept: int = 0) -> int:
        """Release pages beyond the reservation and the first `n_kept` tokens; return the tokens."""
        n_kept = max(n_kept, self.reserved[row])
        n_released = max(0, self.resident[row] - n_kept)
        if n_released:
            self.release_pages(row, n_kept)
            self.resident[row] = n_kept
        return n_released

    def release_pages(self, row: int, n_kept: int = 0) -> None:
        """Return a row's pages to the operating system, except those of its first tokens."""
        if sys.platform != "linux":
            return
        n_head, n_positions, _ = self.row_shape
        n_parts = n_head if n_kept else 1  # each head has kept tokens of its own
        size = self._row_bytes // n_parts
        for block in range(len(self.array)):
            for part in range(n_parts):
                start = self._offset(block, row) + part * size
                first = -(-(start + n_kept * size // n_positions) // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _offset(self, block: int, row: int) -> int:
        return (block * self._n_rows + row) * self._row_bytes


class KVRows:
    """A KVStore of `max_num_seqs` rows of up to `max_model_len` tokens.

    budget_tokens: a token of a prompt's row counts as `prompt_weight`. dtype: of running sequences'
    rows, float32 or int8. A row that was admitted has a row of floats, too, until its prompt is
    computed.
    """

    min_chunk = 2  # a run of one token takes other kernels, which round differently

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
        cache: PrefixCache | None = None,
    ) -> None:
        n_prompt_rows = min(max_num_seqs, MAX_PROMPT_ROWS)
        self.running, self.prompts = (
            RowMemory(
                n_layer=n_layer,
                n_kv_head=n_kv_head,
                head_dim=head_dim,
                n_rows=n_rows,
                max_model_len=max_model_len,
                dtype=row_type,
            )
            for n_rows, row_type in ((max_num_seqs, dtype), (n_prompt_rows, np.float32))
        )
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.prompt_weight = self.prompts.dtype.itemsize // self.running.dtype.itemsize
        self.prompt_token_bytes = self.bytes_per_token(n_layer, n_kv_head, head_dim)
        self.token_bytes = self.prompt_token_bytes // self.prompt_weight
        self.cache = cache or PrefixCache()
        self._free = set(range(max_num_seqs))
        self._free_prompts = set(range(n_prompt_rows))
        self._prompts: dict[int, tuple[int, int]] = {}  # by row: its row of floats, prompt tokens

    @staticmethod
    def bytes_per_token(n_layer: int, n_kv_head: int, head_dim: int, itemsize: int = 4) -> int:
        """Return the size of one token's keys and values in all layers."""
        return 2 * n_layer * n_kv_head * head_dim * itemsize

    @property
    def block_size(self) -> int:
        """See KVStore."""
        return self.cache.block_size

    @property
    def cache_capacity(self) -> int:
        """See KVStore."""
        return self.cache.capacity

    @property
    def movable(self) -> KVRows:
        """See KVStore: a decode run covers all rows up to the last one in use."""
        return self

    @property
    def n_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def reserved_tokens(self) -> int:
        """See KVStore."""
        return sum(self.running.reserved) + self.prompt_weight * sum(self.prompts.reserved)

    @property
    def committed_tokens(self) -> int:
        """Tokens of the budget that are reserved, or that free rows still hold."""
        prompts = self.prompt_weight * self.prompts.committed_tokens
        return self.running.committed_tokens + prompts

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """See KVStore: a sequence takes most while its prompt is computed."""
        return n_prompt + max_tokens + self.prompt_weight * n_prompt

    def block_names(self, prompt_ids: list[int]) -> list[bytes]:
        """See KVStore."""
        return name_blocks(prompt_ids, self.block_size, self.cache_capacity)

    def count_cached(self, names: list[bytes]) -> int:
        """See KVStore."""
        return self.cache.count(names)

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """See KVStore: the lowest free row, to which cached blocks are copied."""
        n_left = self.budget_tokens - self.reserved_tokens
        if not self._free or not self._free_prompts or self.n_needed(n_prompt, max_tokens) > n_left:
            return None
        row, prompt_row = min(self._free), min(self._free_prompts)
        self._free.remove(row)
        self._free_prompts.remove(prompt_row)
        self._prompts[row] = prompt_row, n_prompt
        self.running.reserved[row] = n_prompt + max_tokens
        self.prompts.reserved[prompt_row] = n_prompt
        self._keep_to_budget()
        n_cached = self.cache.restore(self.prompts.array[:, prompt_row], names)
        self._fill(row, 0, n_cached)
        return row, n_cached

    def prompt_row(self, row: int) -> int:
        """Return the row of floats of a row. Raises KeyError once its prompt is computed."""
        return self._prompts[row][0]

    def pad(self, prompt_rows: list[int], n_tokens: int) -> bool:
        """Reserve `n_tokens` in each row, for a padded run; False if the budget has no room."""
        n_missing = sum(max(0, n_tokens - self.prompts.reserved[row]) for row in prompt_rows)
        if self.reserved_tokens + self.prompt_weight * n_missing > self.budget_tokens:
            return False
        for row in prompt_rows:
            self.prompts.reserved[row] = max(n_tokens, self.prompts.reserved[row])
        self._keep_to_budget()
        return True

    def chunk_cost(self, n_tokens: int, n_copied: int, step_tokens: int) -> int:
        """See KVStore: a chunk may be a run of its own, and cached tokens are copied."""
        return max(n_tokens, step_tokens // MAX_CHUNKS_PER_STEP) + n_copied // COPIED_PER_COMPUTED

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """See KVStore: copy them to the running row; after the last, free the row of floats."""
        prompt_row, n_prompt = self._prompts[row]
        self.cache.keep(self.prompts.array[:, prompt_row], names[: end // self.block_size])
        self._fill(row, start, end)
        if end == n_prompt:
            self._free_prompt(row)

    def free(self, row: int) -> None:
        """See KVStore: its pages stay for the next sequence, as far as the budget goes.

        To commit a page again costs more than to overwrite it: 4 % of a prefill.
        """
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        if row in self._prompts:
            self._free_prompt(row)
        self._free.add(row)
        self.running.unreserve(row)

    def release_idle_memory(self) -> None:
        """See MovableRows; also releases pages that runs wrote to in free rows."""
        for memory, free in ((self.running, self._free), (self.prompts, self._free_prompts)):
            for row in free:
                memory.release_pages(row)
                memory.resident[row] = 0

    def move(self, source: int, n_tokens: int) -> int | None:
        """See MovableRows: the reservation moves along."""
        if self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        target = min(self._free)
        self._free.remove(target)
        self.running.reserved[target] = n_tokens
        self._keep_to_budget()
        tokens = self.running.array[:, :, :, :n_tokens]
        tokens[:, target] = tokens[:, source]
        if source in self._prompts:
            self._prompts[target] = self._prompts.pop(source)
        self.running.reserved[target] = self.running.reserved[source]
        self.running.unreserve(source)
        self._free.add(source)
        self._keep_to_budget()
        return target

    def _fill(self, row: int, start: int, end: int) -> None:
        """Copy a prompt's tokens [start, end) to its running row, rounded to that row's type."""
        source = self.prompts.array[:, self.prompt_row(row), :, start:end]
        target = self.running.array[:, row, :, start:end]
        if target.dtype == source.dtype:
            target[:] = source
            return
        for tokens, rounded in zip(source, target, strict=True):  # one block fits the CPU's cache
            whole = np.rint(tokens)
            np.clip(whole, -127, 127, out=whole)
            with np.errstate(invalid="ignore"):  # NaN shows in the logits
                np.copyto(rounded, whole, casting="unsafe")

    def _free_prompt(self, row: int) -> None:
        prompt_row, _ = self._prompts.pop(row)
        self._free_prompts.add(prompt_row)
        self.prompts.unreserve(prompt_row)
        self.prompts.trim(prompt_row, _RETAINED_PROMPT)

    def _keep_to_budget(self) -> None:
        """Release pages beyond the reservations until all fit, those of free rows first.

        Pages of prompts' rows come last: they are few, and the next prompt needs them.
        """
        excess = self.committed_tokens - self.budget_tokens
        rows = range(self.max_num_seqs)
        for row in sorted(rows, key=lambda r: (r in self._free, r), reverse=True):
            if excess <= 0:
                return
            excess -= self.running.trim(row)
        for prompt_row in reversed(range(len(self.prompts.resident))):
            if excess <= 0:
                return
            excess -= self.prompt_weight * self.prompts.trim(prompt_row)


def _map_memory(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
