"""Copies of prompt blocks: the keys and values of prefixes that many prompts share.

Only the results of prefill are kept, never those of decoding, whose bits differ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from server.engine.kv.store import BlockCache

Floats = NDArray[np.float32]

BLOCK_SIZE = 64  # tokens
_BLOCKS_PER_ALLOCATION = 8


class PrefixCache(BlockCache[Floats]):
    """Copies of prompt blocks.

    The least recently used block is dropped first. A chain is always touched as a whole, its first
    block last, so no block outlives its parent: what remains of a chain is its beginning.

    Rows are arrays [2 * n_layer, n_kv_head, n_positions, head_dim].
    """

    def __init__(self, capacity: int = 0, block_size: int = BLOCK_SIZE) -> None:
        super().__init__(capacity, block_size)
        self._spare: list[Floats] = []

    def restore(self, row: Floats, names: list[bytes]) -> int:
        """Copy the cached blocks of a chain to the start of a row; return their tokens."""
        found = names[: self.count(names)]
        for n, name in enumerate(found):
            self._slice(row, n)[:] = self.blocks[name]
        self._touch(found)
        return len(found) * self.block_size

    def keep(self, row: Floats, names: list[bytes]) -> None:
        """Copy the blocks of a chain, which starts the row, unless they are cached already."""
        n_cached = self.count(names)
        self._touch(names[:n_cached])  # or the chain's own beginning could be dropped to make room
        for n, name in enumerate(names[n_cached:], n_cached):
            source = self._slice(row, n)
            self.blocks[name] = block = self._allocate(source.shape)
            block[:] = source
        self._touch(names)

    def _slice(self, row: Floats, n: int) -> Floats:
        return row[:, :, n * self.block_size : (n + 1) * self.block_size]

    def _allocate(self, shape: tuple[int, ...]) -> Floats:
        """Return a spare block or the least recently used one.

        Spare blocks are allocated together: large arrays get huge pages, which are committed
        several times faster.
        """
        if len(self.blocks) == self.capacity:
            return self.blocks.popitem(last=False)[1]
        if not self._spare:
            n_blocks = min(_BLOCKS_PER_ALLOCATION, self.capacity - len(self.blocks))
            self._spare.extend(np.empty((n_blocks, *shape), dtype=np.float32))
        return self._spare.pop()

    def _touch(self, names: list[bytes]) -> None:
        for name in reversed(names):
            self.blocks.move_to_end(name)
