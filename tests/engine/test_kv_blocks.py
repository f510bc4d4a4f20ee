"""Blocks against a model: no token is lost or overwritten by sharing or eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from kvasir.server.engine.kv.blocks import KVBlocks

BLOCK = 4


def make_blocks(n_blocks: int = 12, max_num_seqs: int = 4, keep_prompts: bool = True) -> KVBlocks:
    return KVBlocks(
        n_blocks=n_blocks,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_model_len=40,
        keep_prompts=keep_prompts,
    )


def slots(blocks: KVBlocks, row: int, start: int, end: int) -> NDArray[np.int32]:
    """Return the slots of a row's tokens [start, end)."""
    positions = np.arange(start, end)
    return blocks.slots(np.full_like(positions, row), positions)


class BlocksMachine(RuleBasedStateMachine):
    """Random work with prompts that begin alike. `memory` is the device's, a token per slot."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks()
        self.memory = np.full(12 * BLOCK, -1)
        self.texts: dict[int, list[int]] = {}

    @rule(
        target=rows,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 20),
        reuse=st.booleans(),
        salt=st.sampled_from([b"", b"a", b"b"]),
    )
    def admit(self, prompt: list[int], max_tokens: int, reuse: bool, salt: bytes) -> int | None:
        names = self.blocks.cache.names(prompt, salt)
        reusable = names[: max(0, len(prompt) - 2) // BLOCK] if reuse else []
        n_found = self.blocks.cache.count(reusable)
        admitted = self.blocks.admit(len(prompt), max_tokens, reusable)
        if admitted is None:
            return None
        row, n_cached = admitted
        assert n_cached == n_found * BLOCK
        self.memory[slots(self.blocks, row, n_cached, len(prompt))] = prompt[n_cached:]
        self.blocks.record_prefill(row, n_cached, len(prompt), names)
        new = [7] * max_tokens  # what decoding writes to the rest of its blocks
        self.memory[slots(self.blocks, row, len(prompt), len(prompt) + max_tokens)] = new
        self.texts[row] = prompt + new
        return row

    @rule(row=consumes(rows))
    def free(self, row: int | None) -> None:
        if row is not None:
            self.blocks.free(row)
            del self.texts[row]

    @invariant()
    def every_sequence_reads_what_was_written_for_it(self) -> None:
        for row, text in self.texts.items():
            assert self.memory[slots(self.blocks, row, 0, len(text))].tolist() == text

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.blocks.reserved_tokens <= self.blocks.budget_tokens
        held = {
            int(s) // BLOCK
            for row, text in self.texts.items()
            for s in slots(self.blocks, row, 0, len(text))
        }
        assert self.blocks.reserved_tokens == len(held) * BLOCK
        assert len(self.blocks.free_rows) == 4 - len(self.texts)


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=50, stateful_step_count=30)


def admit(blocks: KVBlocks, prompt: list[int], max_tokens: int = 0) -> tuple[int, int]:
    """Admit a prompt that is computed at once."""
    names = blocks.cache.names(prompt)
    admitted = blocks.admit(len(prompt), max_tokens, names)
    assert admitted is not None
    blocks.record_prefill(admitted[0], admitted[1], len(prompt), names)
    return admitted


def test_the_end_of_a_chain_that_nobody_uses_goes_first() -> None:
    """Of two chains, the one that was freed first."""
    blocks = make_blocks(n_blocks=6)
    old, new = [1] * 12, [2] * 8
    blocks.free(admit(blocks, old)[0])
    blocks.free(admit(blocks, new)[0])
    assert (
        blocks.cache.count(blocks.cache.names(old)),
        blocks.cache.count(blocks.cache.names(new)),
    ) == (3, 2)
    assert blocks.admit(8, 0, []) is not None  # a free block, and the end of the old chain
    assert (
        blocks.cache.count(blocks.cache.names(old)),
        blocks.cache.count(blocks.cache.names(new)),
    ) == (2, 2)


def test_what_is_to_be_shared_is_not_evicted_to_make_room_for_the_rest() -> None:
    blocks = make_blocks(n_blocks=3)
    blocks.free(admit(blocks, [1] * 8)[0])
    row, n_cached = admit(blocks, [1] * 12)
    assert (row, n_cached) == (0, 8)
    assert blocks.admit(1, 0, []) is None  # running sequences keep their blocks
    blocks.free(row)
    assert blocks.admit(12, 0, []) is not None
    assert blocks.cache.count(blocks.cache.names([1] * 12)) == 0


def test_a_slot_beyond_a_sequences_blocks_is_refused() -> None:
    blocks = make_blocks()
    assert blocks.admit(4, 0, []) == (0, 0)
    with pytest.raises(ValueError, match="a row of 1 blocks cannot hold 5 tokens"):
        slots(blocks, 0, 4, 5)


def test_without_a_cache_nothing_is_named() -> None:
    blocks = make_blocks(keep_prompts=False)
    assert blocks.cache.names([1] * 12) == []
    assert [admit(blocks, [1] * 8), admit(blocks, [1] * 8)] == [(0, 0), (1, 0)]
