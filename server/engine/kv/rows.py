"""KV cache rows on the CPU: one budget for the rows of several memories, reservation, compaction.

A prompt is computed on one of a few rows of floats, and copied to its sequence's running row of the
model's own type, int8 or float32. Prompts thus attend to exact keys and values, and decoding reads
a quarter of the bytes.

The budget bounds the pages that may be committed, in tokens of running rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvasir.server.engine.kv.files import PrefixFiles
from kvasir.server.engine.kv.memory import KVShape, RowMemory
from kvasir.server.engine.kv.prefix_cache import Floats, PrefixCache
from kvasir.server.engine.kv.store import KVStore

MAX_PROMPT_ROWS = 8
MAX_CHUNKS_PER_STEP = 8  # each may be a run of its own, which reads every weight
_RETAINED_PROMPT = 1024  # tokens of a finished prompt whose pages are kept for the next one


def n_rows(max_num_seqs: int) -> int:
    """Return the number of rows that sequences and their prompts take, each with a state."""
    # One row more, which no sequence gets: a decode run may need a row beside the last.
    return max_num_seqs + 1 + min(max_num_seqs, MAX_PROMPT_ROWS)


class RowStore(KVStore):
    """A KV cache of rows, each of which has tokens in one or more memories."""

    cache: PrefixCache
    # A sequence's row in each memory, which its tokens fill one memory after the other; and all
    # memories of the budget. The last gives up its pages last.
    _sequence_memories: tuple[RowMemory, ...]
    _memories: tuple[RowMemory, ...]

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""
        return sum(memory.weight * sum(memory.reserved) for memory in self._memories)

    @property
    def committed_tokens(self) -> int:
        """Tokens of the budget that are reserved, or that free rows still hold."""
        return sum(memory.weight * sum(memory.committed) for memory in self._memories)

    def free(self, row: int) -> None:
        """Release a row. Raises ValueError for a row that is free.

        Its pages stay for the next sequence, as far as the budget goes: to commit a page again
        costs more than to overwrite it, 4 % of a prefill.
        """
        super().free(row)
        for memory in self._sequence_memories:
            memory.reserve(row, 0)

    def move(self, source: int, n_tokens: int) -> int | None:
        """See KVStore. A decode run covers all rows up to the last in use."""
        if self.reserved_tokens + n_tokens > self.budget_tokens:
            return None
        target = self._take_row()
        for memory in self._sequence_memories:
            n_here = min(n_tokens, memory.reserved[source])
            memory.reserve(target, n_here)
            n_tokens -= n_here
        self._keep_to_budget()
        for memory in self._sequence_memories:
            memory.copy(source, target, 0, memory.reserved[target])
            memory.reserve(target, memory.reserved[source])
            memory.reserve(source, 0)
        self.free_rows.add(source)
        self._keep_to_budget()
        return target

    def release_idle_memory(self) -> None:
        """See KVStore."""
        for memory in self._memories:
            for row, n_reserved in enumerate(memory.reserved):
                if not n_reserved:
                    memory.release_pages(row)

    def _keep_to_budget(self) -> None:
        """Release pages beyond the reservations until all fit, those of free rows first."""
        excess = self.committed_tokens - self.budget_tokens
        for is_held in (False, True):
            for memory in self._memories:
                for row in reversed(range(len(memory.reserved))):
                    if excess <= 0:
                        return
                    if (memory.reserved[row] > 0) is is_held:
                        excess -= memory.weight * memory.trim(row)


class KVRows(RowStore):
    """Rows of up to `max_model_len` tokens, with a prefix cache.

    budget_tokens: may be reserved at once; a token of a prompt's row counts by its larger bytes.
    dtype: of running sequences' rows, float32 or int8.
    """

    files: PrefixFiles | None = None
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
        n_prompt_rows = n_rows(max_num_seqs) - max_num_seqs - 1
        token_bytes, self.prompt_token_bytes = (
            shape.token_bytes(np.dtype(kind).itemsize) for kind in (dtype, np.float32)
        )
        weight = self.prompt_token_bytes // token_bytes
        self.state_bytes = shape.state_bytes
        # One row more, which no sequence gets: a decode run may need a row beside the last.
        self.running = RowMemory(shape, max_num_seqs + 1, max_model_len, dtype)
        self.prompts = RowMemory(shape, n_prompt_rows, max_model_len, np.float32, weight)
        # Pages of prompts' rows are few, and the next prompt needs them.
        self._sequence_memories, self._memories = (self.running,), (self.running, self.prompts)
        super().__init__(
            max_num_seqs=max_num_seqs,
            budget_tokens=budget_tokens,
            token_bytes=token_bytes,
            cache=cache or PrefixCache(),
        )
        self._free_prompts = set(range(n_prompt_rows))
        # By row: its row of floats, prompt tokens, and those that an earlier prompt begins with.
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def reservation(self, n_prompt: int, max_tokens: int) -> int:
        """See KVStore: a prompt's floats count while it is computed."""
        return n_prompt + max_tokens + self.prompts.weight * n_prompt

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """See KVStore: nothing is shared."""
        n_reserved = self.reserved_tokens + self.reservation(n_prompt, max_tokens)
        if not self.free_rows or not self._free_prompts or n_reserved > self.budget_tokens:
            return None
        row, prompt_row = self._take_row(), min(self._free_prompts)
        self._free_prompts.remove(prompt_row)
        n_common = self.cache.count_kept(names) * self.cache.block_size
        self._prompts[row] = prompt_row, n_prompt, n_common
        self.running.reserve(row, n_prompt + max_tokens)
        self.prompts.reserve(prompt_row, n_prompt)
        self._keep_to_budget()
        if self.prompts.states:
            self.prompts.write_states(prompt_row, None)
        return row, 0

    def restore(self, row: int, names: list[bytes], n_done: int, limit: int) -> int:
        """See KVStore. Beside states all is restored at once, as one is kept at the end alone."""
        prompt_row, size = self.prompt_row(row), self.cache.block_size
        has_states = self.prompts.states
        if has_states and n_done:
            return n_done
        n_most = len(names) if has_states else n_done // size + max(1, limit // size)
        floats = self.prompts.array[:, prompt_row]
        n_cached = self.cache.restore(floats, names, n_done // size, n_most) * size
        if self.files is not None:  # which hold keys and values only
            n_cached = self._restore_files(self.files, floats, names, n_cached, n_most)
        self._fill(row, n_done, n_cached)
        if has_states and n_cached:
            state = self.cache.states[names[n_cached // size - 1]]
            self.prompts.write_states(prompt_row, state)
        return n_cached

    def cut(self, row: int, n_computed: int, limit: int, n_prompt: int) -> tuple[int, int]:
        """See KVStore. A state moves once: with states no token runs twice.

        So a chunk may have a token more, for no rest to be short. It ends with a block if it can,
        for the prefix cache to keep the state there: where an earlier prompt begins to differ, and
        after the last block that the same prompt, or the next turn of a chat, can go on from.
        """
        if not self.prompts.states:
            return super().cut(row, n_computed, limit, n_prompt)
        fewest, size = self.min_chunk, self.cache.block_size
        end = min(n_computed + max(limit, fewest), n_prompt)
        border, n_common = min(end, n_prompt - fewest) // size * size, self._prompts[row][2]
        if n_computed + fewest <= n_common < border:
            border = n_common
        if self.cache.capacity and border - n_computed >= fewest:
            return n_computed, border
        if n_prompt - end == 1:
            end += 1 if end - n_computed == fewest else -1
        return n_computed, end

    def _restore_files(
        self, files: PrefixFiles, row: Floats, names: list[bytes], n_cached: int, n_most: int
    ) -> int:
        """Go on with blocks that are files; return the tokens of all.

        The blocks of the whole hit that are no files are written at its end.
        """
        size = self.cache.block_size
        n = n_cached // size
        block = np.empty((*row.shape[:2], size, row.shape[3]), dtype=row.dtype)
        while n < min(n_most, len(names)) and files.read(names[n], [block]):
            row[:, :, n * size : (n + 1) * size] = block
            n += 1
        if n < n_most or n == len(names):
            files.keep(names[:n], lambda n: [row[:, :, n * size : (n + 1) * size].copy()])
        return n * size

    def prompt_row(self, row: int) -> int:
        """Return the row of floats of a row. Raises KeyError once its prompt is computed."""
        return self._prompts[row][0]

    def pad(self, prompt_rows: list[int], n_tokens: int) -> bool:
        """Reserve `n_tokens` in each row, for a padded run; False if the budget has no room."""
        reserved = self.prompts.reserved
        n_missing = sum(max(0, n_tokens - reserved[row]) for row in prompt_rows)
        if self.reserved_tokens + self.prompts.weight * n_missing > self.budget_tokens:
            return False
        for row in prompt_rows:
            self.prompts.reserve(row, max(n_tokens, reserved[row]))
        self._keep_to_budget()
        return True

    def step_share(self, n_tokens: int, step_tokens: int) -> int:
        """See KVStore: a chunk may be a run of its own."""
        return max(n_tokens, step_tokens // MAX_CHUNKS_PER_STEP)

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Copy a prompt's computed tokens [start, end) to the running row and the prefix cache.

        After the last the row of floats is free, and its state is the running row's. names: of all
        blocks of the prompt.
        """
        prompt_row, n_prompt, n_common = self._prompts[row]
        chain, size = names[: end // self.cache.block_size], self.cache.block_size
        ends_chain = self.prompts.states and len(chain) * size == end
        state = self.prompts.read_states(prompt_row) if ends_chain else None
        # For a state in its middle a long prompt must not drop one that others go on from.
        before = names[: start // size]
        passed = before[-1] if len(before) * size > n_common else b""
        self.cache.keep(self.prompts.array[:, prompt_row], chain, state, passed)
        self._fill(row, start, end)
        if end == n_prompt:
            if self.prompts.states:
                self.running.write_states(row, self.prompts.read_states(prompt_row))
            self._free_prompt(row)

    def free(self, row: int) -> None:
        """See RowStore."""
        super().free(row)
        if row in self._prompts:
            self._free_prompt(row)

    def move(self, source: int, n_tokens: int) -> int | None:
        """See KVStore."""
        target = super().move(source, n_tokens)
        if target is not None and source in self._prompts:
            self._prompts[target] = self._prompts.pop(source)
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
        prompt_row, *_ = self._prompts.pop(row)
        self._free_prompts.add(prompt_row)
        self.prompts.reserve(prompt_row, 0)
        self.prompts.trim(prompt_row, _RETAINED_PROMPT)
