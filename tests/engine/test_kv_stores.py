"""What all KV caches promise the scheduler: rows and a budget that are never handed out twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.kv.source_rows import SourceRows
from kvasir.server.engine.kv.store import KVStore

SHAPE = KVShape(n_layer=2, n_kv_head=3, head_dim=8)
N_ROWS, LONGEST = 4, 60


def rows(budget: int, dtype: type = np.float32) -> KVStore:
    sizes = {"max_num_seqs": N_ROWS, "max_model_len": LONGEST, "budget_tokens": budget}
    return KVRows(SHAPE, **sizes, dtype=dtype)  # type: ignore[arg-type]


def sources(budget: int) -> KVStore:
    sizes = {"max_num_seqs": N_ROWS, "max_source_len": LONGEST, "max_model_len": LONGEST}
    return SourceRows(SHAPE, SHAPE, **sizes, budget_tokens=budget)


def blocks(budget: int) -> KVStore:
    n_blocks = budget // 4
    return KVBlocks(n_blocks=n_blocks, block_size=4, max_num_seqs=N_ROWS, max_model_len=LONGEST)


STORES: dict[str, Callable[[int], KVStore]] = {
    "rows": rows,
    "sources": sources,
    "blocks": blocks,
    "int8 rows": lambda budget: rows(budget, np.int8),
}


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("n_fit", [1, 3, 9])
def test_rows_and_budget_bound_what_is_admitted(name: str, n_fit: int) -> None:
    """The lowest free row comes first; what is free is admitted again at once."""
    n_each = STORES[name](LONGEST).reservation(10, 32)
    store = STORES[name](n_fit * n_each)
    expected = list(range(min(n_fit, N_ROWS)))
    assert [store.admit(10, 32, []) for _ in expected] == [(row, 0) for row in expected]
    assert store.admit(10, 32, []) is None
    assert store.reserved_tokens == len(expected) * n_each <= store.budget_tokens
    assert store.free_rows == set(range(len(expected), N_ROWS))
    store.free(0)
    assert store.reserved_tokens == (len(expected) - 1) * n_each
    with pytest.raises(ValueError, match="row 0 is free already"):
        store.free(0)
    assert store.admit(10, 32, []) == (0, 0)
    for row in expected:
        store.record_prefill(row, 0, 10, [])
        store.free(row)
    store.release_idle_memory()
    assert (store.reserved_tokens, len(store.free_rows)) == (0, N_ROWS)


def test_pages_of_free_rows_go_before_those_of_held_ones() -> None:
    """A free row's target goes before what a held row's longer source has left."""
    store = SourceRows(
        SHAPE, SHAPE, max_num_seqs=4, max_source_len=60, max_model_len=60, budget_tokens=160
    )
    rows = [(row, 0) for row in range(4)]
    assert [store.admit(20, 20, []) for _ in rows] == rows
    for row in range(4):
        store.free(row)
    assert [store.admit(10, 20, []), store.admit(10, 20, []), store.admit(20, 60, [])] == rows[:3]
    assert store.sources.committed[:4] == [20, 20, 20, 0]
    assert store.targets.committed[:4] == [20, 20, 60, 0]


@pytest.mark.parametrize("name", ["rows", "int8 rows", "sources"])
def test_a_move_takes_the_lowest_row_where_the_budget_has_room_for_both(name: str) -> None:
    """With a source and its target, whose tokens lie in two memories."""
    store = STORES[name](400)
    assert [store.admit(10, 40, []) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    for row in range(3):
        store.record_prefill(row, 0, 10, [])
    store.free(0)
    reserved = store.reserved_tokens
    store.budget_tokens = reserved + 14
    assert store.move(2, 15) is None
    assert store.move(2, 14) == 0
    assert store.reserved_tokens == reserved
    assert store.free_rows == {2, 3}
    store.free(0)
    assert store.reserved_tokens == reserved // 2
