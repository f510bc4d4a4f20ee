"""Prompt blocks kept for reuse: keys and values of tokens that many prompts begin with, computed once and copied.

A block is named by the hash of its parent's name and its own tokens, so a name stands for a whole prefix (as in vLLM's
automatic prefix caching). Only what prefill wrote is kept, never a decoded token: the two are not the same bits.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from server.engine.kv.rows import KVRows
from server.engine.kv.store import name_blocks

BLOCK_SIZE = 64  # tokens
_BLOCKS_AT_ONCE = 8


class PrefixCache:
    """Copies of blocks of `block_size` prompt tokens, of `budget_bytes` at most; 0 turns the cache off.

    Blocks are dropped least recently used first. A chain is always touched as a whole, its first block last, so that no
    block outlives its parent: what is left of a chain is its beginning.
    """

    def __init__(self, rows: KVRows, budget_bytes: int, *, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.capacity = budget_bytes // (block_size * rows.prompt_token_bytes)  # blocks
        self._rows = rows
        self._blocks: OrderedDict[bytes, NDArray[np.float32]] = (
            OrderedDict()
        )  # the next to be dropped first
        self._spare: list[NDArray[np.float32]] = []

    def keys(self, prompt_ids: list[int]) -> list[bytes]:
        """Names of the prompt's whole blocks, as many as could be kept."""
        return name_blocks(prompt_ids, self.block_size, self.capacity)

    def count(self, keys: list[bytes]) -> int:
        """How many blocks of a chain are kept, from its first on."""
        return next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))

    def admit(self, n_prompt: int, max_tokens: int, keys: list[bytes]) -> tuple[int, int] | None:
        """A row with what is kept of a prompt, and how many tokens that is; None when it has to wait for one."""
        row = self._rows.allocate(n_prompt, max_tokens)
        if row is None:
            return None
        n_cached = self.restore(row, keys)
        self._rows.fill(row, 0, n_cached)
        return row, n_cached

    def computed(self, row: int, start: int, end: int, keys: list[bytes]) -> None:
        """A prompt's tokens [start, end) are in its row of floats: keep its blocks, whose names are `keys`."""
        self.keep(row, keys)
        self._rows.fill(row, start, end)

    def restore(self, row: int, keys: list[bytes]) -> int:
        """Copy what is kept of a chain to the start of a row; how many tokens that is."""
        found = keys[: self.count(keys)]
        for n, key in enumerate(found):
            self._rows.write(row, n * self.block_size, self._blocks[key])
        self._touch(found)
        return len(found) * self.block_size

    def keep(self, row: int, keys: list[bytes]) -> None:
        """Keep a chain, whose tokens are at the start of the row; blocks that are here already are not copied again."""
        n_kept = self.count(keys)
        self._touch(keys[:n_kept])  # or what makes room could be the chain's own beginning
        for n, key in enumerate(keys[n_kept:], n_kept):
            start = n * self.block_size
            self._blocks[key] = self._rows.read(
                row, start, start + self.block_size, out=self._memory()
            )
        self._touch(keys)

    def _memory(self) -> NDArray[np.float32]:
        """Room for a block: a spare one, or the least recently used.

        Spare ones come several at a time: large arrays are on huge pages, which are committed several times faster.
        """
        if len(self._blocks) == self.capacity:
            return self._blocks.popitem(last=False)[1]
        if not self._spare:
            n_blocks = min(_BLOCKS_AT_ONCE, self.capacity - len(self._blocks))
            n_parts, _, n_head, _, head_dim = (
                self._rows.prompts.array.shape
            )  # keys and values of each layer
            shape = (n_blocks, n_parts, n_head, self.block_size, head_dim)
            self._spare.extend(np.empty(shape, dtype=np.float32))
        return self._spare.pop()

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)
