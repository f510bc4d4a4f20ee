"""Prompt blocks by name, and copies of their keys and values, which many prompts share.

Only the results of prefill are kept, never those of decoding, whose bits differ. A model with
recurrent layers goes on from a block only if its state there is kept too: blocks at whose ends runs
have ended have one.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Floats = NDArray[np.float32]

BLOCK_SIZE = 64  # tokens
_BLOCKS_PER_ALLOCATION = 8
_BLOCKS_PER_STATE = 4  # of a prompt in chunks of 256 tokens


class BlockCache(Generic[T]):
    """At most `capacity` prompt blocks of `block_size` tokens, by name; 0 is off.

    changes: the names of blocks that were kept (True) or dropped (False), for who empties it; None
    notes none.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.blocks: OrderedDict[bytes, T] = OrderedDict()
        self.changes: list[tuple[bytes, bool]] | None = None

    def names(self, prompt_ids: list[int], salt: bytes = b"") -> list[bytes]:
        """Name the whole blocks of a prompt, as many as can be cached.

        A name hashes the previous block's name, or the salt, and the block's tokens, so it stands
        for a whole prefix, and prompts of different salts share no block. It has 128 bits, which
        makes collisions negligible.
        """
        n_blocks = min(len(prompt_ids) // self.block_size, self.capacity)
        tokens = np.array(prompt_ids[: n_blocks * self.block_size], dtype=np.int64)
        names: list[bytes] = []
        for block in tokens.reshape(n_blocks, self.block_size):
            parent = names[-1] if names else salt
            names.append(blake2b(parent + block.tobytes(), digest_size=16).digest())
        return names

    def count(self, names: list[bytes]) -> int:
        """Count the blocks of a chain that are cached, from its first on."""
        return next((n for n, name in enumerate(names) if name not in self.blocks), len(names))

    def put(self, name: bytes, block: T) -> None:
        """Keep a block."""
        self.blocks[name] = block
        if self.changes is not None:
            self.changes.append((name, True))

    def drop(self, name: bytes) -> T:
        """Forget a block, and return it."""
        if self.changes is not None:
            self.changes.append((name, False))
        return self.blocks.pop(name)


class PrefixCache(BlockCache[Floats]):
    """Copies of prompt blocks, of rows as `RowMemory` has them.

    The least recently used block is dropped first. A chain is always touched as a whole, its first
    block last, so no block outlives its parent: what remains of a chain is its beginning.

    n_states: the most states that are kept; the least recently used is dropped first, and the one
    at the end of a chain counts as used last. None is of a model without states.
    """

    def __init__(
        self, capacity: int = 0, block_size: int = BLOCK_SIZE, n_states: int | None = None
    ) -> None:
        super().__init__(capacity, block_size)
        self.n_states = n_states
        self.states: OrderedDict[bytes, Floats] = OrderedDict()  # at the ends of blocks
        self._spare: list[Floats] = []

    @classmethod
    def within(cls, n_bytes: int, block_bytes: int, state_bytes: int) -> PrefixCache:
        """Return a cache that takes so many bytes, with a state for every few blocks."""
        if not state_bytes:
            return cls(n_bytes // block_bytes)
        n_states = n_bytes // (_BLOCKS_PER_STATE * block_bytes + state_bytes)
        return cls(_BLOCKS_PER_STATE * n_states, n_states=n_states)

    def count_kept(self, names: list[bytes]) -> int:
        """Count the blocks of a chain that are cached, with a state at the last or without."""
        return super().count(names)

    def count(self, names: list[bytes]) -> int:
        """Count the blocks of a chain from its first on, up to one that prompts can go on from."""
        n_cached = self.count_kept(names)
        if self.n_states is None:
            return n_cached
        return next((n for n in range(n_cached, 0, -1) if names[n - 1] in self.states), 0)

    def restore(self, row: Floats, names: list[bytes], n_done: int, n_most: int) -> int:
        """Copy the cached blocks of a chain to a row which has `n_done`; return those it has then.

        They are `n_most` at most. All that are cached count as used.
        """
        n_cached = max(n_done, self.count(names))
        self._touch([name for name in names[:n_cached] if name in self.blocks])
        n_cached = min(n_cached, max(n_done, n_most))
        for n in range(n_done, n_cached):
            self._slice(row, n)[:] = self.blocks[names[n]]
        return n_cached

    def keep(
        self,
        row: Floats,
        names: list[bytes],
        state: Floats | None = None,
        passed: bytes = b"",
    ) -> None:
        """Copy the blocks of a chain, which starts the row, unless they are cached already.

        state: at the end of the chain. passed: the block whose state that one replaces if there is
        no room for both.
        """
        n_cached = self.count_kept(names)
        self._touch(names[:n_cached])  # or the chain's own beginning could be dropped to make room
        for n, name in enumerate(names[n_cached:], n_cached):
            source = self._slice(row, n)
            block = self._allocate(source.shape)
            block[:] = source
            self.put(name, block)
        if state is not None and names and self.n_states:
            self.states[names[-1]] = state
        self._touch(names)
        if len(self.states) > (self.n_states or 0):
            oldest = next(iter(self.states))
            del self.states[passed if passed in self.states else oldest]

    def _slice(self, row: Floats, n: int) -> Floats:
        return row[:, :, n * self.block_size : (n + 1) * self.block_size]

    def _allocate(self, shape: tuple[int, ...]) -> Floats:
        """Return a spare block or the least recently used one.

        Spare blocks are allocated together: huge pages of large arrays are committed much faster.
        """
        if len(self.blocks) == self.capacity:
            name = next(iter(self.blocks))
            self.states.pop(name, None)
            return self.drop(name)
        if not self._spare:
            n_blocks = min(_BLOCKS_PER_ALLOCATION, self.capacity - len(self.blocks))
            self._spare.extend(np.empty((n_blocks, *shape), dtype=np.float32))
        return self._spare.pop()

    def _touch(self, names: list[bytes]) -> None:
        for name in reversed(names):
            self.blocks.move_to_end(name)
        for name in names:
            if name in self.states:
                self.states.move_to_end(name)
