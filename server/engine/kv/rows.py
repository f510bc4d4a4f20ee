"""KV cache rows on the CPU: address space, reservation, compaction.

A prompt is computed on one of a few rows of floats, and copied to its sequence's running row of the
model's own type, int8 or float32. Prompts thus attend to exact keys and values, and decoding reads
a quarter of the bytes.

Address space is reserved for the worst case; the operating system commits a page when a token is
first written to it: the page table is the block table (the idea of vAttention, arXiv 2405.04437).
The budget bounds what may be committed, in tokens of running rows.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.kv.prefix_cache import PrefixCache

MAX_PROMPT_ROWS = 8
MAX_CHUNKS_PER_STEP = 8  # each may be a run of its own, which reads every weight
COPIED_PER_COMPUTED = 16  # tokens copied in the time of running one; 20 to 60 were measured
_RETAINED_PROMPT = 1024  # tokens of a finished prompt whose pages are kept for the next one
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it

Floats = NDArray[np.float32]


class KVShape(NamedTuple):
    """The shape of a model's keys and values."""

    n_layer: int
    n_kv_head: int
    head_dim: int

    def token_bytes(self, itemsize: int = 4) -> int:
        """Return the size of one token's keys and values in all layers."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize


class RowMemory:
    """`n_rows` rows of `max_model_len` positions in one private anonymous mapping.

    array: [2 * n_layer, n_rows, n_kv_head, n_positions, head_dim]; block 2i holds layer i's keys,
    block 2i + 1 its values. n_positions is max_model_len rounded up to whole pages, so that
    releasing a row leaves its neighbour alone. reserved: tokens that the holder of each row may
    write. committed: tokens whose pages each row holds, or may take at any time.
    """

    def __init__(self, shape: KVShape, n_rows: int, max_model_len: int, dtype: type[Any]) -> None:
        self.dtype = np.dtype(dtype)
        self.reserved = [0] * n_rows
        self.committed = [0] * n_rows
        per_position = shape.n_kv_head * shape.head_dim * self.dtype.itemsize
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, per_position)
        self.n_positions = math.ceil(max_model_len / step) * step
        self.row_shape = (shape.n_kv_head, self.n_positions, shape.head_dim)
        n_blocks = 2 * shape.n_layer
        self._memory = _map_memory(n_blocks * n_rows * per_position * self.n_positions)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype=self.dtype)
        self.array = self.array.reshape(n_blocks, n_rows, *self.row_shape)

    def reserve(self, row: int, n_tokens: int) -> None:
        """Change a row's reservation; its pages stay if it shrinks."""
        self.reserved[row] = n_tokens
        self.committed[row] = max(self.committed[row], n_tokens)

    def trim(self, row: int, n_kept: int = 0) -> None:
        """Release a row's pages beyond its reservation and its first `n_kept` tokens."""
        n_kept = max(n_kept, self.reserved[row])
        if n_kept < self.committed[row]:
            self.release_pages(row, n_kept)

    def release_pages(self, row: int, n_kept: int = 0) -> None:
        """Return a row's pages to the operating system, except those of its first tokens."""
        self.committed[row] = n_kept
        if sys.platform != "linux":
            return
        n_parts = self.row_shape[0] if n_kept else 1  # each head has kept tokens of its own
        row_bytes = self.array[0, 0].nbytes
        size = row_bytes // n_parts
        for block in range(len(self.array)):
            for part in range(n_parts):
                start = (block * len(self.reserved) + row) * row_bytes + part * size
                kept = start + n_kept * size // self.n_positions
                first = math.ceil(kept / mmap.PAGESIZE) * mmap.PAGESIZE
                end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)


class KVRows:
    """A KV cache of `max_num_seqs` rows of up to `max_model_len` tokens, with a prefix cache.

    budget_tokens: may be reserved at once; a token of a prompt's row counts as `prompt_weight`.
    dtype: of running sequences' rows, float32 or int8. token_bytes: memory of one token, in all
    layers; prompt_token_bytes: additional memory of a prompt's until the prompt is computed.
    """

    # Fewest tokens of a prompt to run at once: a run of one takes kernels that round differently.
    min_chunk = 2

    def __init__(
        self,
        shape: KVShape,
        *,
        max_num_seqs: int,
        max_model_len: int,
        budget_tokens: int,
        dtype: type[Any] = np.float32,
        cache: PrefixCache | None = None,
    ) -> None:
        n_prompt_rows = min(max_num_seqs, MAX_PROMPT_ROWS)
        # One row more, which no sequence gets: a decode run may need a row beside the last.
        self.running = RowMemory(shape, max_num_seqs + 1, max_model_len, dtype)
        self.prompts = RowMemory(shape, n_prompt_rows, max_model_len, np.float32)
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.token_bytes = shape.token_bytes(self.running.dtype.itemsize)
        self.prompt_token_bytes = shape.token_bytes()
        self.prompt_weight = self.prompt_token_bytes // self.token_bytes
        self.cache = cache or PrefixCache()
        self.free_rows = set(range(max_num_seqs))
        self._free_prompts = set(range(n_prompt_rows))
        self._prompts: dict[int, tuple[int, int]] = {}  # by row: its row of floats, prompt tokens

    @property
    def movable(self) -> Self:
        """These rows: a batch binds those in front, and free ones hold pages."""
        return self

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""
        return sum(self.running.reserved) + self.prompt_weight * sum(self.prompts.reserved)

    @property
    def committed_tokens(self) -> int:
        """Tokens of the budget that are reserved, or that free rows still hold."""
        return sum(self.running.committed) + self.prompt_weight * sum(self.prompts.committed)

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """Return the tokens of the budget that a sequence takes while its prompt is computed."""
        return n_prompt + max_tokens + self.prompt_weight * n_prompt

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """Reserve the lowest free row, with all the tokens that a sequence may need.

        names: the blocks to copy if they are cached. Returns the row and its number of cached
        tokens, or None while there is no free row or not enough of the budget.
        """
        n_reserved = self.reserved_tokens + self.n_needed(n_prompt, max_tokens)
        if not self.free_rows or not self._free_prompts or n_reserved > self.budget_tokens:
            return None
        row, prompt_row = min(self.free_rows), min(self._free_prompts)
        self.free_rows.remove(row)
        self._free_prompts.remove(prompt_row)
        self._prompts[row] = prompt_row, n_prompt
        self.running.reserve(row, n_prompt + max_tokens)
        self.prompts.reserve(prompt_row, n_prompt)
        self._keep_to_budget()
        n_cached = self.cache.restore(self.prompts.array[:, prompt_row], names)
        self._fill(row, 0, n_cached)
        return row, n_cached

    def prompt_row(self, row: int) -> int:
        """Return the row of floats of a row. Raises KeyError once its prompt is computed."""
        return self._prompts[row][0]

    def pad(self, prompt_rows: list[int], n_tokens: int) -> bool:
        """Reserve `n_tokens` in each row, for a padded run; False if the budget has no room."""
        reserved = self.prompts.reserved
        n_missing = sum(max(0, n_tokens - reserved[row]) for row in prompt_rows)
        if self.reserved_tokens + self.prompt_weight * n_missing > self.budget_tokens:
            return False
        for row in prompt_rows:
            self.prompts.reserve(row, max(n_tokens, reserved[row]))
        self._keep_to_budget()
        return True

    def chunk_cost(self, n_tokens: int, n_copied: int, step_tokens: int) -> int:
        """Return the share of a step of `step_tokens` that a chunk takes, in tokens.

        It may be a run of its own. n_copied: tokens that the prefix cache copied for it.
        """
        return max(n_tokens, step_tokens // MAX_CHUNKS_PER_STEP) + n_copied // COPIED_PER_COMPUTED

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Copy a prompt's computed tokens [start, end) to the running row and the prefix cache.

        After the last the row of floats is free. names: of all blocks of the prompt.
        """
        prompt_row, n_prompt = self._prompts[row]
        self.cache.keep(self.prompts.array[:, prompt_row], names[: end // self.cache.block_size])
        self._fill(row, start, end)
        if end == n_prompt:
            self._free_prompt(row)

    def free(self, row: int) -> None:
        """Release a row. Raises ValueError for a row that is free.

        Its pages stay for the next sequence, as far as the budget goes: to commit a page again
        costs more than to overwrite it, 4 % of a prefill.
        """
        if row in self.free_rows:
            raise ValueError(f"row {row} is free already")
        if row in self._prompts:
            self._free_prompt(row)
        self.free_rows.add(row)
        self.running.reserve(row, 0)

    def release_idle_memory(self) -> None:
        """Return the memory of free rows, which runs may have written to, to the system."""
        for row in (*self.free_rows, self.max_num_seqs):
            self.running.release_pages(row)
        for row in self._free_prompts:
            self.prompts.release_pages(row)

    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row's first `n_tokens` tokens and its reservation to the lowest free row.

        A decode run covers all rows up to the last in use. Returns the new row, or None if the
        budget has no room for the tokens in both rows.
        """
        if self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        target = min(self.free_rows)
        self.free_rows.remove(target)
        self.running.reserve(target, n_tokens)
        self._keep_to_budget()
        tokens = self.running.array[:, :, :, :n_tokens]
        tokens[:, target] = tokens[:, source]
        if source in self._prompts:
            self._prompts[target] = self._prompts.pop(source)
        self.running.reserve(target, self.running.reserved[source])
        self.running.reserve(source, 0)
        self.free_rows.add(source)
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
        self.prompts.reserve(prompt_row, 0)
        self.prompts.trim(prompt_row, _RETAINED_PROMPT)

    def _keep_to_budget(self) -> None:
        """Release pages beyond the reservations until all fit, those of free rows first.

        Pages of prompts' rows come last: they are few, and the next prompt needs them.
        """
        rows = sorted(range(self.max_num_seqs), key=lambda row: (row not in self.free_rows, -row))
        memories = [(self.running, row) for row in rows]
        memories += [(self.prompts, row) for row in reversed(range(len(self.prompts.reserved)))]
        for memory, row in memories:
            if self.committed_tokens <= self.budget_tokens:
                return
            memory.trim(row)


def _map_memory(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    # Private, or MADV_DONTNEED frees nothing; small pages, or a token commits 2 MiB.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
