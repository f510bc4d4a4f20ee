"""Blocks of keys and values, on CUDA: who holds which, which ones prompts share, and which are kept for the next.

A block belongs to as many sequences as refer to it (Kwon et al. 2023). One that a prompt has filled gets the name of
all tokens up to its end; a later prompt that begins with them refers to the same block, and nothing is copied. A named
block that nobody refers to any more stays until it is needed for something else: the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from server.engine.kv.store import name_blocks


class KVBlocks:
    """`n_blocks` blocks of `block_size` tokens for up to `max_num_seqs` sequences; only who and where, no memory.

    table: int32 [max_num_seqs, blocks of the longest sequence]; a row holds its sequence's blocks in order, from when
    it is admitted: all that it may ever need, so that nothing that runs has to wait. keep_prompts: whether named blocks
    outlive their sequences, and are shared. token_bytes: what one token takes, in all layers, where somebody asks.
    Raises ValueError for no block.
    """

    runs_apart = False  # all tokens of a step are one run, and what prompts share is not copied

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
        self.n_blocks = n_blocks
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.prompt_token_bytes = 0  # on top of it, while a prompt is computed
        self.budget_tokens = n_blocks * block_size
        self.capacity = n_blocks if keep_prompts else 0
        self.table: NDArray[np.int32] = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._held: dict[int, list[int]] = {}  # blocks by row
        self._free_rows = set(range(max_num_seqs))
        self._free = list(range(n_blocks))[::-1]  # blocks without a name and without a holder
        self._holders = [0] * n_blocks
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # named blocks without a holder, the next to go first

    @property
    def n_free(self) -> int:
        return len(self._free_rows)

    @property
    def reserved_tokens(self) -> int:
        """What sequences hold; a block that several share counts once."""
        return self.budget_tokens - (len(self._free) + len(self._idle)) * self.block_size

    def n_needed(self, n_prompt: int, max_tokens: int) -> int:
        """What a sequence takes of the budget when it shares nothing: whole blocks."""
        return -(-(n_prompt + max_tokens) // self.block_size) * self.block_size

    def keys(self, prompt_ids: list[int]) -> list[bytes]:
        """Names of the prompt's whole blocks."""
        return name_blocks(prompt_ids, self.block_size, self.capacity)

    def count(self, keys: list[bytes]) -> int:
        """How many blocks of a chain are here, from its first on."""
        return next((n for n, key in enumerate(keys) if key not in self._named), len(keys))

    def admit(self, n_prompt: int, max_tokens: int, keys: list[bytes]) -> tuple[int, int] | None:
        """A row for a prompt and its new tokens, and how many of its tokens are computed already; None: it has to wait.

        keys: names of the blocks that need not be computed.
        """
        shared = [self._named[key] for key in keys[: self.count(keys)]]
        n_new = self.n_needed(n_prompt, max_tokens) // self.block_size - len(shared)
        n_idle_shared = sum(not self._holders[block] for block in shared)
        if not self._free_rows or n_new > len(self._free) + len(self._idle) - n_idle_shared:
            return None
        row = min(self._free_rows)
        self._free_rows.remove(row)
        for block in shared:
            self._idle.pop(block, None)
        blocks = shared + [self._take() for _ in range(n_new)]
        for block in blocks:
            self._holders[block] += 1
        self._held[row] = blocks
        self.table[row, : len(blocks)] = blocks
        return row, len(shared) * self.block_size

    def computed(self, row: int, start: int, _end: int, keys: list[bytes]) -> None:
        """A prompt's tokens from `start` on are in its row; keys: names of the whole blocks up to there."""
        for n in range(start // self.block_size, len(keys)):
            block = self._held[row][n]
            if keys[n] not in self._named and block not in self._names:
                self._named[keys[n]] = block
                self._names[block] = keys[n]

    def end_prompt(self, _row: int) -> None:
        """Nothing is set aside for prompts."""

    def free(self, row: int) -> None:
        """Let go of a row's blocks. Named ones stay while there is room; the end of a chain goes before its start."""
        if row in self._free_rows:
            raise ValueError(f"row {row} is free already")
        for block in reversed(self._held.pop(row)):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._names:
                self._idle[block] = None
            else:
                self._free.append(block)
        self._free_rows.add(row)

    def move(self, _source: int, _n_tokens: int) -> None:
        """Rows are only names here: no row is better than another."""

    def give_back(self) -> None:
        """The device's memory is held as long as the process lives."""

    def slots(self, row: int, start: int, end: int) -> NDArray[np.int32]:
        """block · block_size + place in it, of a sequence's tokens [start, end).

        Raises ValueError beyond what the sequence was admitted for: those blocks are somebody else's.
        """
        if end > len(self._held[row]) * self.block_size:
            raise ValueError(f"a row of {len(self._held[row])} blocks cannot hold {end} tokens")
        places = np.arange(start, end, dtype=np.int32)
        slots: NDArray[np.int32] = self.table[row, places // self.block_size] * self.block_size
        return slots + places % self.block_size

    def _take(self) -> int:
        """A block to write to: a free one, or the idle one that has not been used for longest, which loses its name."""
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        del self._named[self._names.pop(block)]
        return block
