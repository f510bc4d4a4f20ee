"""Sequences in the background take what those of clients leave, and end for them."""

from __future__ import annotations

import random

import pytest

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import (
    BACKGROUND_PRIORITY,
    FinishReason,
    Sequence,
    SequenceStatus,
)
from tests.kit.engine_driver import Collector, make_sequence, run_to_end
from tests.kit.fake_runner import FakeRunner

VOCAB_SIZE = 64


def sequence(number: int, n_prompt: int, max_tokens: int, *, background: bool) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=number)
    made = make_sequence(number, [1 + (number + i) % 60 for i in range(n_prompt)], params)
    made.priority = BACKGROUND_PRIORITY if background else 0
    made.arrived_at = float(number)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_keeps_the_bounds_and_every_token(seed: int) -> None:
    """Against each sequence alone. Clients never wait while one in the background holds a row."""
    chance = random.Random(seed)
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=10, budget_tokens=chance.choice([400, None]))
    engine, found = Engine(runner, chunk_size=8), Collector()
    made: list[Sequence] = []
    n_waited = 0
    while len(made) < 40 or engine.has_work:
        if len(made) < 40 and chance.random() < 0.3:
            size = chance.randint(1, 20), chance.randint(1, 20)
            made.append(sequence(len(made), *size, background=chance.random() < 0.5))
            engine.add(made[-1])
        if not engine.has_work:
            continue
        waited = [s for s in engine.scheduler.waiting if not s.is_background]
        found.take(engine.step()[0])
        held = engine.scheduler.held
        n_background = sum(one.is_background for one in held)
        still = any(one.status is SequenceStatus.WAITING for one in waited)
        full = not any(s.status is SequenceStatus.PREFILLING and s.n_computed for s in held)
        n_waited = n_waited + 1 if still and n_background and full else 0
        assert n_waited <= 10  # one ends in each step
    for one in made:
        result = found.results[one.id]
        assert len(result.finish_reasons) == 1
        alone = sequence(one.id, len(one.prompt_ids), one.params.max_tokens, background=False)
        tokens = run_to_end(Engine(FakeRunner(VOCAB_SIZE), chunk_size=8), [alone])[one.id].token_ids
        if one.is_background and result.finish_reasons == [FinishReason.ABORT]:
            assert result.token_ids == tokens[: len(result.token_ids)]
        else:
            assert result.token_ids == tokens


def test_beside_streams_few_run_in_the_background_and_few_steps_compute_their_prompts() -> None:
    engine = Engine(FakeRunner(VOCAB_SIZE, max_num_seqs=24, max_model_len=500), chunk_size=8)
    for number in range(16):
        engine.add(sequence(number, 2, 400, background=False))
    for number in range(16, 40):
        engine.add(sequence(number, 12, 3, background=True))
    for _ in range(8):
        engine.step()  # the clients' prompts
    n_steps = n_mixed = 0
    while engine.scheduler.held[0].id == 0:
        n_mixed += engine.step()[1].n_prefill_tokens > 0
        n_steps += 1
        assert sum(one.is_background for one in engine.scheduler.held) <= 3
    assert n_mixed == n_steps // 128
    assert len(engine.scheduler.waiting) < 24


def test_sequences_beyond_the_share_end_once_a_client_comes_the_youngest_first() -> None:
    engine, found = Engine(FakeRunner(VOCAB_SIZE, max_num_seqs=4), chunk_size=8), Collector()
    for number in range(4):
        engine.add(sequence(number, 4, 40, background=True))
    for _ in range(6):
        found.take(engine.step()[0])
    engine.add(sequence(4, 4, 40, background=False))
    for _ in range(4):
        found.take(engine.step()[0])
    held = {one.id for one in engine.scheduler.held}
    assert held == {0, 4}
    ended = [number for number, one in found.results.items() if one.finish_reasons]
    assert sorted(ended) == [1, 2, 3]
