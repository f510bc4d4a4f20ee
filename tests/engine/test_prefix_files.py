"""Prompt blocks as files: the same bits as computed ones, or no block at all."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.kernels.library import FILE, Library
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.kv.files import Parts, PrefixFiles
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.packed import MemoryBlocks, open_packed_runner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.scheduler import Scheduler
from kvasir.server.engine.sequence import Sequence
from kvasir.server.engine.step_capacity import StepCapacity
from tests.kernels.graphs import needs_library
from tests.kit.engine_driver import assert_same, make_sequence, run_to_end
from tests.kit.random_models import RandomModel

FINGERPRINT = b"f" * 16
N_REQUESTS = 6


def make_requests(model: RandomModel, n: int = N_REQUESTS) -> list[Sequence]:
    """Prompts of two blocks and a rest, of which each pair begins alike."""
    requests = []
    for i in range(n):
        generator = np.random.default_rng(i)
        ids = np.random.default_rng(i // 2).integers(model.config.vocab_size, size=150)
        ids = ids[: int(generator.integers(135, 150))]
        ids[130:] = generator.integers(model.config.vocab_size, size=len(ids[130:]))
        params = SamplingParams(max_tokens=6, temperature=0.9 * (i % 2), seed=i, logprobs=2)
        requests.append(make_sequence(i, ids.tolist(), params))
    return requests


def open_engine(model: RandomModel, files: PrefixFiles | None, *, packed: bool) -> Engine:
    """With a cache in memory that is new."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "kv_cache_bytes": 2**26,
        "prefix_cache_bytes": 2**24,
    }
    runner = (
        open_packed_runner(model.graph, model.config, Library(FILE, "auto"), **sizes, threads=2)
        if packed
        else model.runner(**sizes)
    )
    assert isinstance(runner.kv, KVRows | MemoryBlocks)
    runner.kv.files = files
    return Engine(runner, chunk_size=100)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("random_model", False),
        ("random_int8_model", False),
        pytest.param("random_int8_model", True, marks=needs_library),
    ],
)
def test_restored_blocks_give_the_bits_of_computed_ones(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, *, packed: bool
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    expected = [
        run_to_end(open_engine(model, None, packed=packed), [one])[one.id]
        for one in make_requests(model)
    ]
    files = PrefixFiles(tmp_path, FINGERPRINT, 2**30)
    writing = open_engine(model, files, packed=packed)
    for _ in range(3):
        assert_same(run_to_end(writing, make_requests(model)), expected)
    files.wait()
    for damaged in (False, True):
        if damaged:
            file = random.Random(1).choice(sorted(tmp_path.glob("*/*")))
            content = bytearray(file.read_bytes())
            content[-5] ^= 1
            file.write_bytes(content)
        reading = open_engine(model, files, packed=packed)
        requests = make_requests(model)
        assert_same(run_to_end(reading, requests), expected)
        n_cached = sum(one.n_cached for one in requests)
        assert (n_cached == sum(len(one.block_names) * 64 for one in requests)) is not damaged
        assert n_cached > 0


def make_parts(seed: int) -> Parts:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(256, size=(3, 7), dtype=np.uint8),
        generator.standard_normal((2, 5)).astype(np.float32),
    ]


def read(files: PrefixFiles, name: bytes) -> bytes | None:
    parts = [np.zeros_like(part) for part in make_parts(0)]
    return b"".join(part.tobytes() for part in parts) if files.read(name, parts) else None


def content_of(seed: int) -> bytes:
    return b"".join(part.tobytes() for part in make_parts(seed))


def name_of(seed: int) -> bytes:
    return seed.to_bytes(16, "big")


def keep(files: PrefixFiles, *seeds: int) -> None:
    files.keep([name_of(seed) for seed in seeds], lambda n: make_parts(seeds[n]))
    files.wait()


def test_what_is_not_what_was_written_is_no_block(tmp_path: Path) -> None:
    """Hundreds of faults: cut, longer, with another byte, another block's or another model's."""
    chance = random.Random(1)
    files = PrefixFiles(tmp_path / "a", FINGERPRINT, 2**20)
    other = PrefixFiles(tmp_path / "b", b"g" * 16, 2**20)
    keep(files, 1, 2)
    keep(other, 1)
    path = tmp_path / "a" / FINGERPRINT.hex() / name_of(1).hex()
    modes = {file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert (path.parent.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    whole = path.read_bytes()
    foreign = [
        path.with_name(name_of(2).hex()).read_bytes(),
        (tmp_path / "b" / (b"g" * 16).hex() / name_of(1).hex()).read_bytes(),
    ]
    for n in range(400):
        place = chance.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        fault = [whole[:place], whole + b"x", bytes(flipped), b"", *foreign][n % 6]
        path.write_bytes(fault)
        assert read(files, name_of(1)) is None
        files.wait()
        assert not path.exists()
        path.write_bytes(whole)
        assert read(files, name_of(1)) == content_of(1)
    assert read(files, name_of(3)) is None


def test_the_least_recently_used_go_first_and_no_file_outlives_its_parent(tmp_path: Path) -> None:
    """Two processes share the folder, and another model's files count, too."""
    chance, n_fit = random.Random(0), 20
    size = len(content_of(0)) + 52
    folders = [PrefixFiles(tmp_path, FINGERPRINT, n_fit * size) for _ in range(2)]
    folders.append(PrefixFiles(tmp_path, b"g" * 16, n_fit * size))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_text("a" * 10_000)
    for n in range(60):
        first = 100 * chance.randrange(8)
        chain = [*range(first, first + chance.randint(1, 6))]
        files = chance.choice(folders)
        keep(files, *chain)
        found = list(tmp_path.glob("?" * 32 + "/*"))
        uncounted = 2 * (n_fit // 16 + 6)  # of the other two, with a chain
        assert len(found) <= n_fit + uncounted
        names = {(file.parent.name, int(file.name, 16)) for file in found}
        assert all(seed % 100 == 0 or (folder, seed - 1) in names for folder, seed in names)
        assert read(files, name_of(chain[-1])) == content_of(chain[-1]), n
    assert (tmp_path / "notes" / "mine").exists()


def test_without_a_place_for_files_there_are_none_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = PrefixFiles(tmp_path, FINGERPRINT, 2**20)
    folder = tmp_path / FINGERPRINT.hex()
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            keep(files, 1, 2)
    assert len(caplog.records) == 1
    assert read(files, name_of(1)) is None
    folder.mkdir()
    keep(files, 1, 2)
    assert read(files, name_of(2)) == content_of(2)


def test_what_a_killed_process_left_is_removed_in_time(tmp_path: Path) -> None:
    folder = tmp_path / FINGERPRINT.hex()
    folder.mkdir()
    old, new = (folder / f"{name_of(n).hex()}.0123abcd" for n in range(2))
    for path in (old, new):
        path.write_bytes(b"half a block")
    os.utime(old, (1, 1))
    files = PrefixFiles(tmp_path, FINGERPRINT, 2**20)
    files.wait()
    assert [path.exists() for path in (old, new)] == [False, True]
    assert [read(files, name_of(n)) for n in range(2)] == [None, None]


def test_blocks_are_read_in_slices(tmp_path: Path) -> None:
    """Where one is missing, those after it are not read."""
    blocks = MemoryBlocks(n_blocks=8, block_size=4, max_num_seqs=2, max_model_len=32)
    blocks.files = PrefixFiles(tmp_path, FINGERPRINT, 2**20)
    names = blocks.cache.names([*range(28)])
    for name in (*names[:4], names[5]):
        blocks.files.keep([name], lambda _: [])
    blocks.files.wait()
    assert blocks.admit(28, 2, names) == (0, 0)
    found = [
        blocks.restore(0, names, n_done, limit) for n_done, limit in ((0, 8), (8, 3), (12, 99))
    ]
    assert found == [8, 12, 16]
    assert [*blocks.cache.blocks] == names[:4]


def test_prompts_that_come_together_read_a_beginning_once(tmp_path: Path) -> None:
    """Beside a stream, in slices; the one that another reads for waits for it."""
    files = PrefixFiles(tmp_path, FINGERPRINT, 2**20)
    blocks = MemoryBlocks(n_blocks=999, block_size=4, max_num_seqs=4, max_model_len=512)
    blocks.files = files
    scheduler = Scheduler(blocks, StepCapacity(8, 0.0), scoring_chunk_size=8)
    shared = [*range(400)]
    stream, *alike = (
        make_sequence(i, ids, SamplingParams(max_tokens=9))
        for i, ids in enumerate(([1, 2], [*shared, 5, 5], [*shared, 6, 6], [*shared, 7, 7]))
    )
    for sequence in alike:
        names = blocks.cache.names(sequence.prompt_ids)
    for name in names[:100]:
        files.keep([name], lambda _: [])
    files.wait()
    for sequence in (stream, *alike):
        scheduler.add(sequence)
    n_steps = 0
    while any(sequence.status is not stream.status for sequence in alike) or not n_steps:
        batch = scheduler.schedule(0.0)
        for chunk in (*batch.decodes, *batch.prefills):
            scheduler.record(chunk, chunk.count)
        n_steps += 1
    assert [sequence.n_cached for sequence in alike] == [400] * 3
    assert n_steps < 10


def test_blocks_know_only_what_was_read(tmp_path: Path) -> None:
    """A block that could not be restored has no name, whatever it holds then."""
    blocks = MemoryBlocks(n_blocks=8, block_size=4, max_num_seqs=2, max_model_len=16)
    blocks.files = PrefixFiles(tmp_path, FINGERPRINT, 2**20)
    names = blocks.cache.names([*range(12)])
    assert blocks.admit(12, 2, names) == (0, 0)
    assert not blocks.cache.blocks
