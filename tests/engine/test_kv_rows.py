"""Rows of the KV cache: addresses, reservations, pages."""

from __future__ import annotations

import mmap
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.rows import KVRows

SHAPE = KVShape(n_layer=2, n_kv_head=3, head_dim=8)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only")


def make_rows(shape: KVShape = SHAPE, *, int8: int = False, **changes: int) -> KVRows:
    sizes = {"max_num_seqs": 4, "max_model_len": 50, "budget_tokens": 400, **changes}
    return KVRows(shape, **sizes, dtype=np.int8 if int8 else np.float32)  # type: ignore[arg-type]


def admit(rows: KVRows, n_prompt: int, max_tokens: int = 0) -> int | None:
    """The row for a prompt, without a prefix cache."""
    admitted = rows.admit(n_prompt, max_tokens, [])
    return admitted and admitted[0]


def end_prompt(rows: KVRows, row: int) -> None:
    """Compute the whole prompt."""
    rows.record_prefill(row, 0, rows._prompts[row][1], [])


@given(
    st.integers(1, 9), st.sampled_from([8, 16, 64, 80, 128]), st.integers(1, 5000), st.booleans()
)
@settings(max_examples=40)
def test_a_row_is_a_whole_number_of_pages(
    n_kv_head: int, head_dim: int, max_model_len: int, int8: bool
) -> None:
    """A partial page would zero the neighbour's tokens when a row's pages are released."""
    shape = KVShape(2, n_kv_head, head_dim)
    rows = make_rows(shape, max_model_len=max_model_len, max_num_seqs=2, int8=int8)
    for n_bytes, memory in (
        (rows.prompt_token_bytes, rows.prompts),
        (rows.token_bytes, rows.running),
    ):
        assert memory.n_positions >= max_model_len
        assert n_bytes * memory.n_positions == memory.array[:, 0].nbytes
        for block, row in np.ndindex(4, 2):
            assert memory.array[block, row].ctypes.data % mmap.PAGESIZE == 0


def test_releasing_pages_leaves_neighbours_and_kept_tokens_alone() -> None:
    """The beginnings of a row's heads, rounded to pages, and everything of the other rows."""
    memory = make_rows(max_model_len=3000).running
    memory.array[:] = 1.0
    memory.release_pages(1, n_kept=700)
    assert (memory.array[:, [0, 2, 3]] == 1.0).all()
    assert (memory.array[:, 1, :, :700] == 1.0).all()
    if sys.platform == "linux":
        assert (memory.array[:, 1, :, 1000:2800] == 0.0).all()
        memory.release_pages(1)
        assert (memory.array[:, 1] == 0.0).all()


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_is_filled_with_its_prompt_rounded_to_its_type(int8: bool) -> None:
    """Against the arithmetic; the extremes are clipped, and nothing else is written."""
    rows = make_rows(int8=int8)
    admit(rows, 20)
    assert admit(rows, 20) == 1
    generator = np.random.default_rng(0)
    rows.prompts.array[:] = generator.standard_normal(rows.prompts.array.shape) * 70
    prompt = rows.prompts.array[:, rows.prompt_row(1), :, 4:9]
    rows.record_prefill(1, 4, 9, [])
    written = rows.running.array[:, 1, :, 4:9].copy()
    rows.running.array[:, 1, :, 4:9] = 0
    assert not rows.running.array.any()
    if not int8:
        assert (written == prompt).all()
        return
    assert (np.abs(written - np.clip(prompt, -127, 127)) <= 0.5).all()
    assert {-127, 127} <= set(written.reshape(-1).tolist())


def test_padding_is_reserved_or_refused_and_kept_no_longer_than_a_prompt() -> None:
    rows = make_rows(int8=True, budget_tokens=100)
    assert [admit(rows, 7), admit(rows, 9)] == [0, 1]
    assert not rows.pad([0, 1], 12)
    assert rows.reserved_tokens == 5 * 16
    assert rows.pad([0, 1], 10)
    assert rows.reserved_tokens == 16 + 4 * 20
    assert rows.pad([0], 5)
    end_prompt(rows, 0)
    end_prompt(rows, 1)
    assert rows.reserved_tokens == 16
    rows = make_rows(max_model_len=3000, budget_tokens=4000)
    admit(rows, 1000)
    assert rows.pad([0], 1500)
    end_prompt(rows, 0)
    assert rows.committed_tokens == 1000 + 1024


# Memory that the operating system has committed

LARGE = {"max_model_len": 20000, "budget_tokens": 20000}
DEEP = SHAPE._replace(n_layer=4)


_PRESENT = 1 << 63  # of an entry of /proc/self/pagemap, of eight bytes (Linux, proc(5))


def committed(rows: KVRows) -> int:
    """Bytes of the pages in memory; those of the rest of the process do not count."""
    n_pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for array in (rows.running.array, rows.prompts.array):
            pages.seek(array.ctypes.data // mmap.PAGESIZE * 8)
            entries = pages.read(-(-array.nbytes // mmap.PAGESIZE) * 8)
            n_pages += int((np.frombuffer(entries, dtype=np.uint64) >= _PRESENT).sum())
    return n_pages * mmap.PAGESIZE


@ON_LINUX
def test_touched_tokens_take_memory_until_it_is_released() -> None:
    """Would catch a shared mapping, which MADV_DONTNEED does not free, and huge pages."""
    rows = make_rows(DEEP, max_num_seqs=8, max_model_len=20000, budget_tokens=40000)
    row = admit(rows, 20000)
    assert row is not None
    rows.running.array[:, row] = 1.0
    written = committed(rows)
    assert written == pytest.approx(20000 * rows.token_bytes, rel=0.2)
    rows.free(row)
    rows.release_idle_memory()
    assert committed(rows) < written / 4


@ON_LINUX
def test_what_free_rows_wrote_is_released() -> None:
    """A decode run writes a token to every free row before the last that runs, and to the next."""
    rows = make_rows(int8=True)
    assert [admit(rows, 1), admit(rows, 1)] == [0, 1]
    rows.running.array[:, :, :, 0] = 1
    rows.free(0)
    rows.release_idle_memory()
    assert (rows.running.array.any(axis=(0, 2, 3, 4)) == [False, True, False, False, False]).all()


@ON_LINUX
@pytest.mark.parametrize("int8", [False, True])
def test_any_work_keeps_to_the_budget(int8: bool) -> None:
    """Sequences begin, end their prompts, move and end; each writes all that it may.

    They often take all that is left. Free rows keep pages for the next sequence, but never beside
    more reservations than fit; nor does a row keep them while another takes its reservation.
    """
    chance = random.Random(3)
    shape = KVShape(n_layer=8, n_kv_head=1, head_dim=64)  # pages are of few tokens
    rows = make_rows(shape, max_num_seqs=8, int8=int8, **LARGE)
    whole = rows.token_bytes * rows.budget_tokens
    lengths: dict[int, int] = {}
    peak = 0

    def write(row: int) -> None:
        rows.running.array[:, row, :, : lengths[row]] = 1
        if row in rows._prompts:
            prompt_row, n_prompt, _ = rows._prompts[row]
            rows.prompts.array[:, prompt_row, :, :n_prompt] = 1.0

    for _ in range(150):
        row = chance.choice([None, *lengths])
        if row is None:
            room = rows.budget_tokens - rows.reserved_tokens
            room = chance.choice((room, room // 2, min(room, 400)))
            n_prompt = int(chance.choice((0.0, 0.5, 1.0)) * room) // (1 + rows.prompts.weight)
            n_new = room - n_prompt * (1 + rows.prompts.weight) + chance.choice((0, 0, 1))
            n_reserved = rows.reserved_tokens + n_prompt * (1 + rows.prompts.weight) + n_new
            fits = n_reserved <= rows.budget_tokens and rows.free_rows and rows._free_prompts
            admitted = admit(rows, n_prompt, n_new)
            assert (admitted is not None) == bool(fits)
            if admitted is not None:
                lengths[admitted] = n_prompt + n_new
                write(admitted)
        elif row in rows._prompts and chance.random() < 0.7:
            end_prompt(rows, row)
        elif rows.free_rows and chance.random() < 0.5:
            if (target := rows.move(row, min(lengths[row], 100))) is not None:
                lengths[target] = lengths.pop(row)
                write(target)
        else:
            rows.free(row)
            del lengths[row]
        assert rows.reserved_tokens <= rows.committed_tokens <= rows.budget_tokens
        held = committed(rows)
        assert held < 1.1 * whole
        peak = max(peak, held)
    assert peak > 0.8 * whole, "the budget is not used"
