"""KV cache rows of a decoder with an encoder, on the CPU: sources beside targets.

A sequence's source lies in the same row of one memory as its target in another. Both have one
budget; a source's token takes as much of it as a target's.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import KVShape, RowMemory


class SourceRows:
    """A KV cache of `max_num_seqs` rows of a source and a target, see KVStore.

    shape: of the decoder, which makes keys and values of both. No prompt is looked up: a source's
    tokens attend to those after them, so a common beginning has no common keys.
    """

    prompt_token_bytes = 0

    def __init__(
        self,
        shape: KVShape,
        *,
        max_num_seqs: int,
        max_source_len: int,
        max_model_len: int,
        budget_tokens: int,
    ) -> None:
        # One row more, which no sequence gets: a decode run may need a row beside the last.
        self.sources = RowMemory(shape, max_num_seqs + 1, max_source_len, np.float32)
        self.targets = RowMemory(shape, max_num_seqs + 1, max_model_len, np.float32)
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.token_bytes = shape.token_bytes()
        self.min_chunk = max_source_len  # a source is never cut
        self.cache = PrefixCache()
        self.free_rows = set(range(max_num_seqs))

    @property
    def movable(self) -> Self:
        """These rows: a run binds those in front, and free ones hold pages."""
        return self

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""
        return sum(self.sources.reserved) + sum(self.targets.reserved)

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """Return the tokens of the budget that a sequence takes for each of its rows."""
        return n_prompt + max_tokens

    def admit(self, n_prompt: int, max_tokens: int, _names: list[bytes]) -> tuple[int, int] | None:
        """Reserve the lowest free row, as `KVRows.admit` does; max_tokens: of the whole target."""
        n_reserved = self.reserved_tokens + n_prompt + max_tokens
        if not self.free_rows or n_reserved > self.budget_tokens:
            return None
        row = min(self.free_rows)
        self.free_rows.remove(row)
        self._reserve(row, n_prompt, max_tokens)
        return row, 0

    def chunk_cost(self, n_tokens: int, _n_copied: int, _step_tokens: int) -> int:
        """Return a source's share of a step in tokens: several sources are one run."""
        return n_tokens

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Do nothing: the run has written a source to where it stays."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy a target's tokens [start, end) to another row, and with the first the source."""
        tokens = self.targets.array[:, :, :, start:end]
        tokens[:, target] = tokens[:, source]
        if not start:
            tokens = self.sources.array[:, :, :, : self.sources.reserved[source]]
            tokens[:, target] = tokens[:, source]

    def free(self, row: int) -> None:
        """Release a row; its pages stay for the next sequence, as far as the budget goes.

        Raises ValueError for a row that is free.
        """
        if row in self.free_rows:
            raise ValueError(f"row {row} is free already")
        self.free_rows.add(row)
        self._reserve(row, 0, 0)

    def release_idle_memory(self) -> None:
        """Return the memory of free rows, which runs may have written to, to the system."""
        for row in (*self.free_rows, self.max_num_seqs):
            self.sources.release_pages(row)
            self.targets.release_pages(row)

    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row of `n_tokens` tokens, the source's first, to the lowest free one.

        Returns that, or None if the budget has no room for the tokens in both rows.
        """
        if self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        n_source, n_target = self.sources.reserved[source], self.targets.reserved[source]
        target = min(self.free_rows)
        self.free_rows.remove(target)
        self._reserve(target, min(n_tokens, n_source), max(0, n_tokens - n_source))
        for memory in (self.sources, self.targets):
            tokens = memory.array[:, :, :, : memory.reserved[target]]
            tokens[:, target] = tokens[:, source]
        self._reserve(target, n_source, n_target)
        self.free(source)
        return target

    def _reserve(self, row: int, n_source: int, n_target: int) -> None:
        """Change a row's reservations; then release pages beyond the budget, free rows' first."""
        self.sources.reserve(row, n_source)
        self.targets.reserve(row, n_target)
        memories = (self.sources, self.targets)
        n_committed = sum(sum(memory.committed) for memory in memories)
        rows = sorted(range(self.max_num_seqs), key=lambda row: (row not in self.free_rows, -row))
        for memory, other in ((memory, row) for row in rows for memory in memories):
            if n_committed <= self.budget_tokens:
                return
            n_committed -= memory.committed[other]
            memory.trim(other)
            n_committed += memory.committed[other]
