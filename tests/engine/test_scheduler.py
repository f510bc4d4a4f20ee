"""The scheduler without a model: the chunks of each step, and the order of admission."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.scheduler import Scheduler
from kvasir.server.engine.sequence import PRIORITY_LEVEL_SECONDS, Sequence, SequenceStatus
from kvasir.server.engine.step_capacity import StepCapacity
from tests.kit.engine_driver import make_sequence

BLOCK = 4


def make_scheduler(
    chunk_size: int = 8, cache_blocks: int = 0, max_num_seqs: int = 8, **options: Any
) -> Scheduler:
    rows = KVRows(
        KVShape(1, 1, 1),
        max_num_seqs=max_num_seqs,
        max_model_len=512,
        budget_tokens=4096,
        cache=PrefixCache(cache_blocks, BLOCK),
    )
    options = {"scoring_chunk_size": chunk_size} | options
    return Scheduler(rows, StepCapacity(chunk_size, 0.0), **options)


def add(scheduler: Scheduler, *prompts: list[int], **params: Any) -> list[Sequence]:
    sequences = [
        make_sequence(i, ids, SamplingParams(max_tokens=9, **params))
        for i, ids in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def distinct(*lengths: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    return [[1000 * i + n for n in range(length)] for i, length in enumerate(lengths)]


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """(sequence, start, end) of the prefills of one step, all of which is then done."""
    batch = scheduler.schedule(0.0)
    for chunk in (*batch.decodes, *batch.prefills):
        scheduler.record(chunk, chunk.count)
    return [(chunk.sequence.id, chunk.start, chunk.end) for chunk in batch.prefills]


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((2, 3, 3, 1), [[(0, 0, 2), (1, 0, 3), (2, 0, 3)], [(3, 0, 1)]]),
        ((5, 9, 4), [[(0, 0, 5), (1, 0, 3)], [(1, 3, 9), (2, 0, 2)], [(2, 2, 4)]]),
        ((7, 5), [[(0, 0, 7)], [(1, 0, 5)]]),  # one token of room is not enough to begin
        ((7, 1), [[(0, 0, 7), (1, 0, 1)]]),  # unless that is the prompt
        # A one-token tail runs with the token before it.
        ((9, 4), [[(0, 0, 8)], [(0, 7, 9), (1, 0, 4)]]),
        ((20,), [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 20)]]),
    ],
)
def test_a_step_is_filled_with_prompts_in_their_order(
    lengths: tuple[int, ...], steps: list[list[tuple[int, int, int]]]
) -> None:
    scheduler = make_scheduler(chunk_size=8)
    add(scheduler, *distinct(*lengths))
    assert [step(scheduler) for _ in range(len(steps) + 1)] == [*steps, []]


def test_a_scored_prompt_ends_the_step_and_keeps_to_its_own_bound() -> None:
    """Two of them could write more logits than the buffer holds."""
    scheduler = make_scheduler(chunk_size=12, scoring_chunk_size=4)
    add(scheduler, *distinct(6, 3, 3), prompt_logprobs=0)
    assert [step(scheduler) for _ in range(5)] == [
        [(0, 0, 4)],
        [(0, 4, 6)],
        [(1, 0, 3)],
        [(2, 0, 3)],
        [],
    ]
    behind = make_scheduler(chunk_size=12, scoring_chunk_size=8)
    add(behind, *distinct(9))
    add(behind, [5] * 6, prompt_logprobs=0)
    add(behind, [6] * 2)
    assert [step(behind) for _ in range(3)] == [[(0, 0, 9), (0, 0, 3)], [(0, 3, 6)], [(0, 0, 2)]]


def test_a_prompt_waits_a_step_for_a_block_that_another_computes() -> None:
    scheduler = make_scheduler(chunk_size=32, cache_blocks=20)
    shared = list(range(2 * BLOCK))
    add(scheduler, [*shared, 90, 91], [*shared, 80, 81, 82], [*shared, 70, 71], [5, 6])
    assert step(scheduler) == [(0, 0, 10), (3, 0, 2)]
    assert step(scheduler) == [(1, 8, 11), (2, 8, 10)]


def test_a_prompt_waits_only_for_what_it_needs_next() -> None:
    """Another prompt that computes a later block of its own makes nobody wait."""
    scheduler = make_scheduler(chunk_size=64, cache_blocks=20)
    first = list(range(BLOCK))
    add(scheduler, [*first, 1, 1])
    step(scheduler)
    add(scheduler, [*first, *[2] * 8], [*first, *[3] * 8], [*first, *[2] * 4, *[4] * 3])
    assert step(scheduler) == [(0, 4, 12), (1, 4, 12)]
    assert step(scheduler) == [(2, 8, 11)]


def test_without_a_cache_nobody_waits_for_a_block() -> None:
    scheduler = make_scheduler(chunk_size=32)
    add(scheduler, *[[1] * 10] * 3)
    assert step(scheduler) == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]


def test_what_is_copied_takes_its_share_of_the_step() -> None:
    """A step that copied a long prefix for many prompts would stall the running streams."""
    scheduler = make_scheduler(chunk_size=64, cache_blocks=200)
    shared = list(range(480))
    add(scheduler, [*shared, 1, 1])
    while step(scheduler):
        pass
    add(scheduler, *[[*shared, i, i, i] for i in range(5)])
    # Each takes 480 / 16 tokens and the 8 of a run: the second finds no room for all of that.
    assert step(scheduler) == [(0, 480, 483)]
    assert step(scheduler) == [(1, 480, 483), (2, 480, 483)]


def test_beside_streams_a_long_prefix_is_copied_in_several_steps() -> None:
    """Two take as many as each alone; without streams nothing is gained by it."""
    scheduler = make_scheduler(chunk_size=16, cache_blocks=200)
    shared = list(range(480))
    (stream,) = add(scheduler, [*shared, 1, 1])
    while step(scheduler):
        pass
    long, again, short = add(scheduler, [*shared, 2, 2], [*shared, 2, 2, 2], [3, 3])
    copied: list[list[int]] = []
    while not again.is_restored:
        step(scheduler)
        copied.append([long.n_computed, again.n_computed])
    assert copied == [[256, 0], [482, 0], [483, 256], [484, 482]]
    assert (long.n_cached, again.n_cached, short.n_computed) == (480, 480, 0)
    for sequence in (stream, short, long, again):
        scheduler.finish(sequence)
    add(scheduler, [*shared, 4, 4, 4])
    assert step(scheduler) == [(0, 480, 483)]


def test_a_prefix_that_is_dropped_while_it_is_copied_is_computed() -> None:
    scheduler = make_scheduler(chunk_size=16, cache_blocks=200)
    shared = list(range(480))
    add(scheduler, [*shared, 1, 1])
    while step(scheduler):
        pass
    (long,) = add(scheduler, [*shared, 2, 2, 2])
    assert step(scheduler) == []
    for name in long.block_names[:100]:
        scheduler.kv.cache.drop(name)
    assert step(scheduler) == [(0, 256, 272)]


def test_a_row_in_prefill_is_no_decode_and_an_abort_frees_it() -> None:
    scheduler = make_scheduler(chunk_size=8)
    sequences = add(scheduler, *distinct(3, 9, 4))
    step(scheduler)
    assert [s.status for s in sequences] == [
        SequenceStatus.RUNNING,
        SequenceStatus.PREFILLING,
        SequenceStatus.WAITING,
    ]
    scheduler.finish(sequences[1])
    batch = scheduler.schedule(0.0)
    assert [chunk.sequence for chunk in batch.decodes] == [sequences[0]]
    (chunk,) = batch.prefills
    assert (chunk.sequence, chunk.start, chunk.end, chunk.n_logits) == (sequences[2], 0, 4, 1)
    assert sequences[2].row == 1


def oldest(waiting: list[Sequence], now: float) -> Sequence:
    """The oracle: the lowest priority value after aging; ties by id."""
    return min(
        waiting, key=lambda s: (s.priority - (now - s.arrived_at) / PRIORITY_LEVEL_SECONDS, s.id)
    )


def test_priorities_age_whatever_the_moment() -> None:
    """Random arrivals, aborts and starts; times are multiples of 0.5 s, so ages are exact."""
    chance = random.Random(0)
    scheduler = make_scheduler(chunk_size=8, max_num_seqs=1)
    waiting: list[Sequence] = []
    now = 0.0
    for sequence_id in range(300):
        now += chance.choice([0.0, 0.5, 4.0]) * PRIORITY_LEVEL_SECONDS
        sequence = make_sequence(sequence_id, [1, 2], SamplingParams(max_tokens=9))
        sequence.priority, sequence.arrived_at = chance.randint(-3, 3), now
        waiting.append(sequence)
        scheduler.add(sequence)
        if chance.random() < 0.3:
            waiting.remove(left := chance.choice(waiting))
            scheduler.finish(left)
        while waiting and chance.random() < 0.4:
            expected = oldest(waiting, now + chance.choice([0.0, 1000.0]) * PRIORITY_LEVEL_SECONDS)
            (chunk,) = scheduler.schedule(0.0).prefills
            assert chunk.sequence is expected
            waiting.remove(expected)
            scheduler.record(chunk, chunk.count)
            scheduler.finish(expected)


def test_what_has_a_row_keeps_it_whatever_comes() -> None:
    scheduler = make_scheduler(chunk_size=8, max_num_seqs=1)
    (first,) = add(scheduler, [1] * 20)
    step(scheduler)
    urgent = make_sequence(9, [2, 2], SamplingParams(max_tokens=9))
    urgent.priority = -100
    scheduler.add(urgent)
    assert step(scheduler) == [(0, 8, 16)]
    assert first.status is SequenceStatus.PREFILLING


def test_what_is_cached_of_those_that_wait_is_known_in_each_step() -> None:
    """A tiny cache adds and drops blocks all the time; the order depends on what it has."""
    chance = random.Random(0)
    scheduler = make_scheduler(cache_blocks=6, max_num_seqs=2)
    beginnings = [[n] * 12 for n in range(3)]
    n_changed = 0
    for number in range(60):
        prompt = chance.choice(beginnings)[: chance.randint(4, 12)] + [9] * chance.randint(2, 5)
        scheduler.add(make_sequence(number, prompt, SamplingParams(max_tokens=1)))
        before = {sequence: sequence.n_found for sequence in scheduler.waiting}
        cached = {
            s: scheduler.kv.cache.count(s.block_names[: (len(s.prompt_ids) - 2) // BLOCK])
            for s in scheduler.waiting
        }
        batch = scheduler.schedule(0.0)
        assert all(s.n_found == cached[s] for s in scheduler.waiting)
        n_changed += sum(s.n_found != before[s] for s in scheduler.waiting)
        for chunk in batch.chunks:
            scheduler.record(chunk, chunk.count)
            if chunk.completes_prompt:
                scheduler.finish(chunk.sequence)
    assert n_changed > 5
