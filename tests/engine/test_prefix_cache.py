"""The cache of prompt blocks against a dictionary of token tuples."""

from __future__ import annotations

from functools import cache
from itertools import combinations, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.server.engine.kv.prefix_cache import PrefixCache

BLOCK = 2
LENGTH = 24


@cache
def content(*prompt_ids: int) -> NDArray[np.float32]:
    """Keys and values [4, 3, len, 8] of a prompt; a token's depend on all before it."""
    seeds = [prompt_ids[: n + 1] for n in range(len(prompt_ids))]
    tokens = [
        np.random.default_rng(seed).standard_normal((4, 3, 8), dtype=np.float32) for seed in seeds
    ]
    return np.stack(tokens, axis=2) if tokens else np.zeros((4, 3, 0, 8), dtype=np.float32)


class Oracle:
    """Prefixes as tuples of all their tokens, with the time of their last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}
        self.clock = count()

    def prefixes(self, prompt_ids: list[int]) -> list[tuple[int, ...]]:
        ends = range(BLOCK, len(prompt_ids) + 1, BLOCK)
        return [tuple(prompt_ids[:end]) for end in ends][: self.capacity]

    def found(self, prompt_ids: list[int]) -> list[tuple[int, ...]]:
        found = []
        for prefix in self.prefixes(prompt_ids):
            if prefix not in self.used:
                break
            found.append(prefix)
        return found

    def restore(self, prompt_ids: list[int]) -> int:
        found = self.found(prompt_ids)
        self.used.update(dict.fromkeys(found, next(self.clock)))
        return len(found) * BLOCK

    def keep(self, prompt_ids: list[int]) -> None:
        now = next(self.clock)
        self.used.update(dict.fromkeys(self.found(prompt_ids), now))
        for prefix in self.prefixes(prompt_ids):
            if prefix not in self.used and len(self.used) == self.capacity:
                del self.used[min(self.used, key=lambda old: (self.used[old], -len(old)))]
            self.used[prefix] = now


# Few, over two token ids: they come again, and most share a beginning with another.
PROMPTS = [np.random.default_rng(i).integers(2, size=3 + i % 10).tolist() for i in range(20)] + [
    [],
    [1],
]


@given(
    capacity=st.sampled_from([0, 1, 2, 3, 5, 50]),
    work=st.lists(st.tuples(st.booleans(), st.sampled_from(PROMPTS)), min_size=20, max_size=60),
)
@settings(max_examples=60)
def test_any_work_against_a_dictionary_of_prefixes(
    capacity: int, work: list[tuple[bool, list[int]]]
) -> None:
    """Would catch blocks of another prefix, a wrong order, a chain that evicts its beginning."""
    blocks, oracle = PrefixCache(capacity, BLOCK), Oracle(capacity)
    for keeps, prompt_ids in work:
        chain, expected = blocks.names(prompt_ids), content(*prompt_ids)
        row = np.full((4, 3, LENGTH, 8), np.nan, dtype=np.float32)
        if keeps:
            row[:, :, : len(prompt_ids)] = expected
            blocks.keep(row, chain)
            oracle.keep(prompt_ids)
            row[:] = np.nan  # a block is a copy, not a view
        else:
            n_done, n_blocks = -1, 0
            while n_blocks > n_done:  # in slices of a block, as beside streams
                n_done, n_blocks = n_blocks, blocks.restore(row, chain, n_blocks, n_blocks + 1)
            n_tokens = n_blocks * BLOCK
            assert n_tokens == oracle.restore(prompt_ids)
            assert (row[:, :, :n_tokens] == expected[:, :, :n_tokens]).all()
            assert np.isnan(row[:, :, n_tokens:]).all()
        assert [blocks.count(blocks.names(ids)) for ids in PROMPTS] == [
            len(oracle.found(ids)) for ids in PROMPTS
        ]


def test_prompts_of_different_salts_share_no_name() -> None:
    """Not even where one prompt continues with what another begins with."""
    blocks = PrefixCache(50, BLOCK)
    prompts = [[1] * 12, [1, 1, 2, 2, 1, 1, 1, 1]]
    named = [set(blocks.names(ids, salt)) for salt in (b"", b"a", b"b") for ids in prompts]
    assert [len(one & other) for one, other in combinations(named, 2) if one & other] == [1] * 3
    assert blocks.names([1] * 12) == blocks.names([1] * 12, b"")


def test_a_block_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if several prompts that begin with it are kept."""
    blocks = PrefixCache(50, BLOCK)
    row = np.zeros((4, 3, LENGTH, 8), dtype=np.float32)
    copied: list[tuple[int, ...]] = []
    allocate = blocks._allocate

    def counting(shape: tuple[int, ...]) -> NDArray[np.float32]:
        copied.append(shape)
        return allocate(shape)

    monkeypatch.setattr(blocks, "_allocate", counting)
    for end in (3, 8, 8, 12):
        blocks.keep(row, blocks.names(list(range(end))))
    assert copied == [(4, 3, BLOCK, 8)] * 6
