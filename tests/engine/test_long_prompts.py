"""Long prompts beside short ones on blocks: equal bits, no copies, and nothing computed twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from kvasir.kernels.library import FILE, Library
from kvasir.kernels.page import BLOCK_SIZE
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.packed import MemoryBlocks, open_packed_runner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence
from tests.engine.test_invariance import RandomCapacity
from tests.kernels.graphs import needs_library
from tests.kit.engine_driver import Result, assert_same, make_sequence, run_at_random, run_to_end
from tests.kit.random_models import RandomModel, export_random

LONGEST = 8192
N_REQUESTS = 40  # of which each mix has some
pytestmark = needs_library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return export_random(tmp_path_factory.mktemp("model"), "int8", max_model_len=LONGEST)


def open_runner(model: RandomModel, **options: Any) -> PagedRunner:
    library = Library(FILE, "auto")
    options = {"max_num_seqs": 4, "threads": 1, "kv_cache_bytes": 2**24} | options
    return open_packed_runner(model.graph, model.config, library, **options)


def make_request(i: int) -> Sequence:
    """Every third is long. Half begin alike; greedy and sampled, of three keys."""
    generator = np.random.default_rng(i)
    length = int(generator.integers(300, 700) if i % 3 == 0 else generator.integers(1, 90))
    prompt_ids = generator.integers(300, size=length).tolist()
    shared = np.random.default_rng(99).integers(300, size=length // 2 * (i % 2)).tolist()
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 12)), temperature=0.9 * (i % 2), seed=i, logprobs=2
    )
    sequence = make_sequence(i, [*shared, *prompt_ids[len(shared) :]], params)
    sequence.owner = "abc"[i % 3]
    return sequence


@cache
def run_alone(model: RandomModel) -> dict[int, Result]:
    engine = Engine(open_runner(model, max_num_seqs=1, prefix_cache_bytes=0), chunk_size=LONGEST)
    return {i: run_to_end(engine, [make_request(i)])[i] for i in range(N_REQUESTS)}


def check_mix(model: RandomModel, seed: int) -> None:
    """Requests at random times, some of which leave, in steps of any room and chunks of any size.

    Would catch a step that depends on whose tokens are in it.
    """
    generator = np.random.default_rng(seed)
    runner = open_runner(model, max_num_seqs=int(generator.choice([2, 4, 9])))
    engine = Engine(
        runner, chunk_size=int(generator.choice([16, 48, 256])), speculate=bool(seed % 2)
    )
    engine.scheduler.capacity = RandomCapacity(generator)
    chosen = generator.permutation(N_REQUESTS)[:12].tolist()
    requests = [make_request(i) for i in chosen]
    for number, request in enumerate(requests):
        request.id = number
    results = run_at_random(engine, requests, generator, n_aborted=int(generator.integers(6)))
    alone = run_alone(model)
    assert_same(results, [alone[i] for i in chosen])
    assert runner.kv.reserved_tokens == 0


@pytest.mark.parametrize("seed", range(2))
def test_mixes_with_disconnects_answer_as_each_request_alone(model: RandomModel, seed: int) -> None:
    check_mix(model, seed)


def test_a_whole_hit_copies_nothing(model: RandomModel) -> None:
    """Two prompts of 512 share all blocks but the last, which only the new tokens change."""
    runner = open_runner(model)
    assert isinstance(runner.kv, MemoryBlocks)
    engine = Engine(runner, chunk_size=256)
    prompt_ids = np.random.default_rng(0).integers(300, size=512).tolist()
    first, again = (make_sequence(i, prompt_ids, SamplingParams(max_tokens=1)) for i in range(2))
    run_to_end(engine, [first])
    before = [bytes(memory) for memory, _ in runner.kv._memories]
    run_to_end(engine, [again])
    assert again.n_cached == 512 - BLOCK_SIZE
    changed = set[int]()
    for (memory, size), old in zip(runner.kv._memories, before, strict=True):
        blocks = [np.frombuffer(part, np.uint8).reshape(-1, size) for part in (bytes(memory), old)]
        changed |= set(np.flatnonzero((blocks[0] != blocks[1]).any(axis=1)).tolist())
    assert len(changed) <= 2  # the last tokens of the prompt, and the new one


def test_a_chat_that_grows_computes_what_is_new(model: RandomModel) -> None:
    """256 tokens a turn up to 8,000: less than a block more, and the answer before it."""
    engine = Engine(open_runner(model, max_num_seqs=1), chunk_size=256)
    chat: list[int] = []
    turns = np.random.default_rng(0).integers(300, size=(31, 256)).tolist()
    for number, turn in enumerate(turns):
        chat += turn
        sequence = make_sequence(number, chat.copy(), SamplingParams(max_tokens=4, seed=0))
        engine.add(sequence)
        n_computed = 0
        while engine.has_work:
            n_computed += engine.step()[1].n_prefill_tokens
        assert n_computed <= len(turn) + 4 + BLOCK_SIZE
        assert n_computed == len(chat) - sequence.n_cached
        chat += sequence.output_ids
    assert len(chat) > 7900
