"""Rows of keys and values: addresses, promises, pages."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv_rows import KVRows


def make_rows(**changes: int) -> KVRows:
    shape = {"n_layer": 2, "n_kv_head": 3, "head_dim": 8, "max_num_seqs": 4, "max_model_len": 50, "budget_tokens": 150}
    return KVRows(**{**shape, **changes})


@given(st.integers(1, 9), st.sampled_from([8, 16, 64, 80, 128]), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_a_row_is_a_whole_number_of_pages(n_kv_head: int, head_dim: int, max_model_len: int) -> None:
    """A partial page would zero the neighbour's tokens when a row is given back."""
    rows = make_rows(n_kv_head=n_kv_head, head_dim=head_dim, max_model_len=max_model_len, max_num_seqs=2)
    assert rows.n_positions >= max_model_len
    assert (rows.address(1, 0) - rows.address(0, 0)) % mmap.PAGESIZE == 0
    assert (rows.address(0, 1) - rows.address(0, 0)) % mmap.PAGESIZE == 0
    assert rows.address(0, 0) % mmap.PAGESIZE == 0


def test_views_are_the_memory_at_the_address_and_do_not_overlap() -> None:
    rows = make_rows()
    for block in range(4):
        for row in range(4):
            view = rows.view(block, row)
            assert view.ctypes.data == rows.address(block, row)
            assert view.shape == (3, rows.n_positions, 8)
            view[:] = 10 * block + row
    assert all((rows.view(block, row) == 10 * block + row).all() for block in range(4) for row in range(4))


def test_what_is_read_of_a_row_is_written_to_another() -> None:
    """Against the views, one block of memory at a time; nothing beside those tokens changes."""
    rows = make_rows()
    generator = np.random.default_rng(0)
    for block in range(4):
        for row in range(4):
            rows.view(block, row)[:] = generator.standard_normal(rows.row_shape)
    before = [[rows.view(block, row).copy() for row in range(4)] for block in range(4)]
    tokens = rows.read(1, 5, 17)
    assert tokens.shape == (4, 3, 12, 8)
    used = np.zeros_like(tokens)
    assert rows.read(1, 5, 17, out=used) is used
    rows.write(2, 30, used)
    for block in range(4):
        assert (tokens[block] == before[block][1][:, 5:17]).all()
        before[block][2][:, 30:42] = before[block][1][:, 5:17]
        assert all((rows.view(block, row) == before[block][row]).all() for row in range(4))


def test_freeing_a_row_leaves_its_neighbours_alone() -> None:
    rows = make_rows()
    for _ in range(3):
        rows.allocate(50)
    for block in range(4):
        for row in range(3):
            rows.view(block, row)[:] = 1.0
    rows.free(1)
    assert all((rows.view(block, row) == 1.0).all() for block in range(4) for row in (0, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_only_touched_tokens_take_memory_and_giving_back_returns_it() -> None:
    """Would catch a shared mapping, which MADV_DONTNEED does not free, and huge pages."""
    rows = make_rows(n_layer=4, max_num_seqs=8, max_model_len=20000, budget_tokens=160000)
    process = psutil.Process()
    before = process.memory_info().rss
    row = rows.allocate(20000)
    assert row is not None
    for block in range(8):
        rows.view(block, row)[:] = 1.0
    written = process.memory_info().rss - before
    assert written == pytest.approx(8 * 3 * 20000 * 8 * 4, rel=0.2)
    rows.free(row)
    rows.give_back()
    assert process.memory_info().rss - before < written / 4


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_what_free_rows_still_hold_stays_within_the_budget() -> None:
    """Pages of free rows are kept for the next sequence, but never beside more promises than the budget has."""
    rows = make_rows(n_layer=4, max_num_seqs=4, max_model_len=20000, budget_tokens=20000)
    process = psutil.Process()
    before = process.memory_info().rss
    whole = 8 * 3 * 20000 * 8 * 4  # bytes of the budget

    def fill(n_tokens: int) -> int:
        row = rows.allocate(n_tokens)
        assert row is not None
        for block in range(8):
            rows.view(block, row)[:, :n_tokens] = 1.0
        return row

    rows.free(fill(20000))
    assert process.memory_info().rss - before > 0.9 * whole  # still there
    held = [fill(5000), fill(5000), fill(5000)]
    assert process.memory_info().rss - before < 1.1 * whole
    for row in held:
        rows.free(row)
    fill(20000)
    assert process.memory_info().rss - before < 1.1 * whole


def test_promises_are_bounded_by_rows_and_by_budget() -> None:
    rows = make_rows()
    assert [rows.allocate(n) for n in (60, 60, 40)] == [0, 1, None]  # 160 tokens are more than 150
    assert rows.allocate(30) == 2
    assert rows.reserved_tokens == 150
    rows.free(0)
    assert rows.reserved_tokens == 90
    assert rows.allocate(10) == 0  # the lowest free row
    assert [rows.allocate(1), rows.allocate(1)] == [3, None]
    with pytest.raises(ValueError, match="free already"):
        make_rows().free(0)


def test_a_move_takes_the_tokens_and_the_promise_along() -> None:
    rows = make_rows(max_model_len=200, budget_tokens=200)
    for n in (10, 20, 130):
        rows.allocate(n)
    moved = np.random.default_rng(0).standard_normal((4, 3, 130, 8)).astype(np.float32)
    rows.write(2, 0, moved)
    rows.free(0)
    assert rows.move(2, 130) == 0
    assert (rows.read(0, 0, 130) == moved).all()
    assert rows.reserved_tokens == 150
    rows.free(0)
    assert rows.reserved_tokens == 20
    assert rows.n_free == 3


def test_bytes_per_token_counts_keys_and_values_of_every_layer() -> None:
    rows = make_rows()
    row_bytes = np.prod((3, rows.n_positions, 8)) * 4
    assert KVRows.bytes_per_token(n_layer=2, n_kv_head=3, head_dim=8) * rows.n_positions == row_bytes * 4
