"""The interface of a KV cache: rows on CPU, blocks on CUDA."""

from __future__ import annotations

from typing import Any, Protocol

from kvasir.server.engine.kv.prefix_cache import BlockCache


class MovableRows(Protocol):
    """Rows whose place and pages matter."""

    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row to the lowest free one and return that; None without room in the budget."""

    def release_idle_memory(self) -> None:
        """Return the pages of free rows to the operating system."""


class KVStore(Protocol):
    """A KV cache of `max_num_seqs` rows within a budget, and its prefix cache."""

    max_num_seqs: int
    budget_tokens: int
    token_bytes: int  # of one token, in all layers
    prompt_token_bytes: int  # as much again, until the token's prompt is computed
    min_chunk: int  # fewest tokens of a prompt that may run at once, if it has as many

    @property
    def cache(self) -> BlockCache[Any]:
        """The blocks of the prefix cache."""

    @property
    def movable(self) -> MovableRows | None:
        """The rows, if their place and pages matter."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """Return the most tokens of the budget that a sequence takes, if it shares none."""

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """Reserve a row for a sequence; return it and its cached tokens, or None without room."""

    def chunk_cost(self, n_tokens: int, n_copied: int, step_tokens: int) -> int:
        """Return the share of a step of `step_tokens` that a chunk takes, in tokens."""

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Note that a prompt's tokens [start, end) are computed; names: of all its blocks."""

    def free(self, row: int) -> None:
        """Give a row and its reservation back."""
