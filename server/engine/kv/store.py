"""The interface of a KV cache, and prompt blocks by name."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")


class KVStore(Protocol):
    """A KV cache of `max_num_seqs` rows within a budget, with a prefix cache.

    budget_tokens: tokens that may be reserved at once. token_bytes: memory of one token, in all
    layers. prompt_token_bytes: additional memory of a prompt's token until its prompt is computed.
    min_chunk: fewest tokens of a prompt to run at once, if it has as many, so that the results do
    not depend on how it was cut.
    """

    max_num_seqs: int
    budget_tokens: int
    token_bytes: int
    prompt_token_bytes: int
    min_chunk: int

    @property
    def cache(self) -> BlockCache[Any]:
        """The blocks of the prefix cache."""

    @property
    def movable(self) -> MovableRows | None:
        """This store, if it matters which of its rows are in use."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that sequences hold."""

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """Return the most tokens of the budget that a sequence takes, if it shares none."""

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """Reserve a row with all the tokens that a sequence may need.

        names: the blocks to reuse if they are cached. Returns the row and its number of cached
        tokens, or None while there is no free row or not enough of the budget.
        """

    def chunk_cost(self, n_tokens: int, n_copied: int, step_tokens: int) -> int:
        """Return the share of a step of `step_tokens` that a chunk takes, in tokens.

        n_copied: tokens that were copied from the prefix cache for it.
        """

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Take over a prompt's tokens [start, end), which were just computed.

        names: the names of all blocks of the prompt.
        """

    def free(self, row: int) -> None:
        """Release a row. Raises ValueError for a row that is free."""


class MovableRows(Protocol):
    """Rows of host memory: which of them are in use decides how much a run reads."""

    def move(self, source: int, n_tokens: int) -> int | None:
        """Move a row's first `n_tokens` tokens to the lowest free row, and return that row.

        Returns None where the budget has no room for the tokens in both rows.
        """

    def release_idle_memory(self) -> None:
        """Return the memory of all free rows to the operating system."""


class BlockCache(Generic[T]):
    """At most `capacity` prompt blocks of `block_size` tokens, by name; 0 is off."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.blocks: OrderedDict[bytes, T] = OrderedDict()

    def names(self, prompt_ids: list[int]) -> list[bytes]:
        """Name the whole blocks of a prompt, as many as can be cached.

        A name is a hash of the previous block's name and the block's own tokens, so it stands for a
        whole prefix. It has 128 bits, which makes collisions negligible.
        """
        n_blocks = min(len(prompt_ids) // self.block_size, self.capacity)
        tokens = np.array(prompt_ids[: n_blocks * self.block_size], dtype=np.int64)
        names: list[bytes] = []
        for block in tokens.reshape(n_blocks, self.block_size):
            parent = names[-1] if names else b""
            names.append(blake2b(parent + block.tobytes(), digest_size=16).digest())
        return names

    def count(self, names: list[bytes]) -> int:
        """Count the blocks of a chain that are cached, from its first on."""
        return next((n for n, name in enumerate(names) if name not in self.blocks), len(names))
