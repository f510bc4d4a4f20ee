"""Bookkeeping of KV cache blocks on CUDA: which sequence holds which, which are shared or reusable.

A block belongs to every sequence that refers to it (Kwon et al. 2023). One that a prompt has filled
gets the name of all tokens up to its end; later prompts with the same beginning share it uncopied.
A named block without a holder stays until its memory is needed, the most recently used longest.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.kv.prefix_cache import BlockCache
from kvasir.server.engine.kv.store import KVStore


class KVBlocks(KVStore):
    """A KV cache of `n_blocks` blocks of `block_size` tokens, whose memory is elsewhere.

    All chunks of a step are one run, whose kernels do not depend on their lengths.

    table: int32 [max_num_seqs, blocks of the longest sequence]; a row lists its sequence's blocks.
    keep_prompts: share named blocks and keep them after their sequences have ended.

    Raises ValueError if n_blocks is 0.
    """

    cache: BlockCache[int]
    steps_are_runs = True

    def __init__(
        self,
        *,
        n_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        keep_prompts: bool = True,
        token_bytes: int = 0,
    ) -> None:
        if n_blocks < 1:
            raise ValueError(f"kv_cache_memory holds no block of {block_size} tokens")
        super().__init__(
            max_num_seqs=max_num_seqs,
            budget_tokens=n_blocks * block_size,
            token_bytes=token_bytes,
            cache=BlockCache[int](n_blocks if keep_prompts else 0, block_size),
        )
        self.block_size = block_size
        shape = (max_num_seqs, -(-max_model_len // block_size))
        self.table: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self._held: dict[int, list[int]] = {}  # blocks by row
        self._n_held = np.zeros(max_num_seqs, dtype=np.int32)  # their number, 0 of a free row
        self._free = list(range(n_blocks))[::-1]  # blocks without a name and without a holder
        self._n_holders = [0] * n_blocks
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, without a holder; LRU first

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the blocks that sequences hold; a shared block counts once."""
        return self.budget_tokens - (len(self._free) + len(self._idle)) * self.block_size

    def reservation(self, n_prompt: int, max_tokens: int) -> int:
        """See KVStore: whole blocks."""
        return -(-(n_prompt + max_tokens) // self.block_size) * self.block_size

    def admit(self, n_prompt: int, max_tokens: int, names: list[bytes]) -> tuple[int, int] | None:
        """See KVStore: cached blocks are shared."""
        shared = [self.cache.blocks[name] for name in names[: self.cache.count(names)]]
        n_new = self.reservation(n_prompt, max_tokens) // self.block_size - len(shared)
        n_idle_shared = sum(not self._n_holders[block] for block in shared)
        if not self.free_rows or n_new > len(self._free) + len(self._idle) - n_idle_shared:
            return None
        row = self._take_row()
        for block in shared:
            self._idle.pop(block, None)
        blocks = shared + [self._take() for _ in range(n_new)]
        for block in blocks:
            self._n_holders[block] += 1
        self._held[row] = blocks
        self._n_held[row] = len(blocks)
        self.table[row, : len(blocks)] = blocks
        return row, len(shared) * self.block_size

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """See KVStore: the blocks that end in [start, end) get their names."""
        for n in range(start // self.block_size, min(end // self.block_size, len(names))):
            block = self._held[row][n]
            if names[n] not in self.cache.blocks and block not in self._names:
                self.cache.put(names[n], block)
                self._names[block] = names[n]

    def free(self, row: int) -> None:
        """See KVStore: named blocks stay while there is room, a chain's beginning longest."""
        super().free(row)
        for block in reversed(self._held.pop(row)):
            self._n_holders[block] -= 1
            if not self._n_holders[block] and block in self._names:
                self._idle[block] = None
            elif not self._n_holders[block]:
                self._free.append(block)
        self._n_held[row] = 0

    def move(self, source: int, n_tokens: int) -> int | None:
        """See KVStore: rows are only names."""

    def release_idle_memory(self) -> None:
        """Do nothing: the memory of all blocks stays allocated."""

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return block · block_size + offset of tokens: their rows, and their places in those.

        Raises ValueError beyond a row's reservation: those blocks belong to other sequences.
        """
        places = positions // self.block_size
        if (outside := places >= self._n_held[rows]).any():
            row, position = rows[outside][0], positions[outside][0]
            raise ValueError(
                f"a row of {self._n_held[row]} blocks cannot hold {position + 1} tokens"
            )
        first: NDArray[np.int32] = self.table[rows, places] * self.block_size
        return first + (positions % self.block_size).astype(np.int32)

    def _take(self) -> int:
        """Return a free block, or the least recently used idle one, which loses its name."""
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        self.cache.drop(self._names.pop(block))
        return block
