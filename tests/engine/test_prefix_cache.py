"""The cache of prompt blocks against a dictionary of token tuples."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from server.engine.kv.rows import KVRows
from server.engine.prefix_cache import PrefixCache

BLOCK = 2
LENGTH = 24


def make_cache(n_blocks: float) -> tuple[PrefixCache, KVRows]:
    rows = KVRows(
        n_layer=2,
        n_kv_head=3,
        head_dim=8,
        max_num_seqs=2,
        max_model_len=LENGTH,
        budget_tokens=4 * LENGTH,
    )
    assert [rows.allocate(LENGTH) for _ in range(2)] == [0, 1]
    return PrefixCache(
        rows, int(n_blocks * BLOCK * rows.prompt_token_bytes), block_size=BLOCK
    ), rows


def content(prompt_ids: list[int]) -> NDArray[np.float32]:
    """Keys and values [4, 3, len, 8] of a prompt: those of a token depend on all that stand before it."""
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


# Few enough to come again, of two tokens: most begin like some other.
PROMPTS = [np.random.default_rng(i).integers(2, size=3 + i % 10).tolist() for i in range(20)] + [
    [],
    [1],
]


@given(
    capacity=st.sampled_from([0, 1, 2, 3, 5, 50]),
    work=st.lists(st.tuples(st.booleans(), st.sampled_from(PROMPTS)), min_size=20, max_size=60),
)
@settings(max_examples=150)
def test_any_work_against_a_dictionary_of_prefixes(
    capacity: int, work: list[tuple[bool, list[int]]]
) -> None:
    """Blocks of another prefix, blocks dropped in the wrong order, a chain that evicts its own beginning."""
    cache, rows = make_cache(capacity)
    oracle = Oracle(capacity)
    for keeps, prompt_ids in work:
        keys, expected = cache.keys(prompt_ids), content(prompt_ids)
        if keeps:
            rows.write(1, 0, expected)
            cache.keep(1, keys)
            oracle.keep(prompt_ids)
            rows.write(1, 0, np.full_like(expected, np.nan))  # a block is a copy, not a view
        else:
            rows.write(0, 0, np.full((4, 3, LENGTH, 8), np.nan, dtype=np.float32))
            n_tokens = cache.restore(0, keys)
            assert n_tokens == oracle.restore(prompt_ids)
            assert (rows.read(0, 0, n_tokens) == expected[:, :, :n_tokens]).all()
            assert np.isnan(rows.read(0, n_tokens, LENGTH)).all()
        assert [cache.count(cache.keys(ids)) for ids in PROMPTS] == [
            len(oracle.found(ids)) for ids in PROMPTS
        ]


def test_a_block_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a prompt that begins with it is kept."""
    cache, rows = make_cache(50)
    starts: list[int] = []
    read = rows.read

    def counting(
        row: int, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        starts.append(start)
        return read(row, start, stop, out)

    monkeypatch.setattr(rows, "read", counting)
    for end in (3, 8, 8, 12):
        cache.keep(0, cache.keys(list(range(end))))
    assert starts == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("n_blocks", [0, 0.9])
def test_a_budget_below_one_block_keeps_nothing(n_blocks: float) -> None:
    cache, _ = make_cache(n_blocks)
    assert cache.keys([1, 2, 3, 4]) == []
