"""The interface of a KV cache, with what its kinds have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvasir.server.engine.kv.prefix_cache import BlockCache


class KVStore(ABC):
    """A KV cache of `max_num_seqs` rows within a budget of tokens, and its prefix cache.

    token_bytes: memory of one token, in all layers; prompt_token_bytes: additional memory of a
    prompt's until the prompt is computed; state_bytes: of a row's states, beside the budget.
    min_chunk: fewest tokens of a prompt that may run at once, if it has as many. steps_are_runs: a
    step is one run of the model.
    """

    min_chunk = 1
    steps_are_runs = False
    prompt_token_bytes = state_bytes = 0

    def __init__(
        self, *, max_num_seqs: int, budget_tokens: int, token_bytes: int, cache: BlockCache[Any]
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.budget_tokens = budget_tokens
        self.token_bytes = token_bytes
        self.cache = cache
        self.free_rows = set(range(max_num_seqs))

    @property
    def sizes(self) -> dict[str, int]:
        """Its bytes and tokens, as the log and GET /model name them."""
        return {
            "bytes_per_token": self.token_bytes,
            "prompt_bytes_per_token": self.prompt_token_bytes,
            "budget_tokens": self.budget_tokens,
            "state_bytes_per_sequence": self.state_bytes,
        }

    @property
    @abstractmethod
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""

    def cut(
        self,
        row: int,  # noqa: ARG002
        n_computed: int,
        limit: int,
        n_prompt: int,
    ) -> tuple[int, int]:
        """Return the start and the end of a prompt's next chunk, of at most `limit` tokens.

        row: of its sequence. A chunk has at least `min_chunk`, so a short rest starts earlier and
        writes the same bits again.
        """
        end = min(n_computed + max(limit, self.min_chunk), n_prompt)
        return max(0, min(n_computed, end - self.min_chunk)), end

    def reservation(self, n_prompt: int, max_tokens: int) -> int:
        """Return the most tokens of the budget that a sequence takes for each of its rows."""
        return n_prompt + max_tokens

    @abstractmethod
    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """Reserve the lowest free row, with all the tokens that a sequence may need.

        names: the blocks to reuse if they are cached. Returns the row and its number of tokens that
        are shared without a copy, or None while there is no free row or not enough of the budget.
        """

    def restore(self, row: int, names: list[bytes], n_done: int, limit: int) -> int:  # noqa: ARG002
        """Copy cached blocks of a prompt into its row, from `n_done` tokens on.

        It may stop after `limit` tokens, but not before a block. Returns the tokens then done.
        """
        return n_done

    def step_share(self, n_tokens: int, step_tokens: int) -> int:  # noqa: ARG002
        """Return the share of a step of `step_tokens` that a chunk takes, in tokens."""
        return n_tokens

    @abstractmethod
    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Note that a prompt's tokens [start, end) are computed; names: of all its blocks."""

    def free(self, row: int) -> None:
        """Give a row and its reservation back. Raises ValueError for a row that is free."""
        if row in self.free_rows:
            raise ValueError(f"row {row} is free already")
        self.free_rows.add(row)

    @abstractmethod
    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row of `n_tokens` tokens and its reservation to the lowest free row.

        Returns that, or None where the place does not matter, or the budget has no room for the
        tokens in both rows.
        """

    @abstractmethod
    def release_idle_memory(self) -> None:
        """Return the memory of free rows, which runs may have written to, to the system."""

    def _take_row(self) -> int:
        row = min(self.free_rows)
        self.free_rows.remove(row)
        return row
