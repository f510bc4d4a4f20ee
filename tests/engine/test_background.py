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


def make(number: int, n_prompt: int, max_tokens: int, *, background: bool) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=number)
    sequence = make_sequence(number, [1 + (number + i) % 60 for i in range(n_prompt)], params)
    sequence.priority = BACKGROUND_PRIORITY if background else 0
    sequence.arrived_at = float(number)
    return sequence


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_keeps_the_bounds_and_every_token(seed: int) -> None:
    """Against each sequence alone. Clients never wait while one in the background holds a row."""
    chance = random.Random(seed)
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=10, budget_tokens=chance.choice([400, None]))
    engine, collector = Engine(runner, chunk_size=8), Collector()
    sequences: list[Sequence] = []
    n_waited = 0
    while len(sequences) < 40 or engine.has_work:
        if len(sequences) < 40 and chance.random() < 0.3:
            size = chance.randint(1, 20), chance.randint(1, 20)
            sequences.append(make(len(sequences), *size, background=chance.random() < 0.5))
            engine.add(sequences[-1])
        if not engine.has_work:
            continue
        waited = [s for s in engine.scheduler.waiting if not s.is_background]
        collector.take(engine.step()[0])
        held = engine.scheduler.held
        n_background = sum(sequence.is_background for sequence in held)
        still = any(sequence.status is SequenceStatus.WAITING for sequence in waited)
        full = not any(s.status is SequenceStatus.PREFILLING and s.n_computed for s in held)
        n_waited = n_waited + 1 if still and n_background and full else 0
        assert n_waited <= 10  # one ends in each step
    for sequence in sequences:
        result = collector.results[sequence.id]
        assert len(result.finish_reasons) == 1
        n_prompt, max_tokens = len(sequence.prompt_ids), sequence.params.max_tokens
        alone = make(sequence.id, n_prompt, max_tokens, background=False)
        run_to_end(Engine(FakeRunner(VOCAB_SIZE), chunk_size=8), [alone])
        tokens = alone.output_ids
        if sequence.is_background and result.finish_reasons == [FinishReason.ABORT]:
            assert result.token_ids == tokens[: len(result.token_ids)]
        else:
            assert result.token_ids == tokens


def test_beside_streams_few_run_in_the_background_and_few_steps_compute_their_prompts() -> None:
    engine = Engine(FakeRunner(VOCAB_SIZE, max_num_seqs=24, max_model_len=500), chunk_size=8)
    for number in range(16):
        engine.add(make(number, 2, 400, background=False))
    for number in range(16, 40):
        engine.add(make(number, 12, 3, background=True))
    for _ in range(8):
        engine.step()  # the clients' prompts
    n_steps = n_mixed = 0
    while engine.scheduler.held[0].id == 0:
        n_mixed += engine.step()[1].n_prefill_tokens > 0
        n_steps += 1
        assert sum(sequence.is_background for sequence in engine.scheduler.held) <= 3
    assert n_mixed == n_steps // 128
    assert len(engine.scheduler.waiting) < 24


def test_sequences_beyond_the_share_end_once_a_client_comes_the_youngest_first() -> None:
    engine, collector = Engine(FakeRunner(VOCAB_SIZE, max_num_seqs=4), chunk_size=8), Collector()
    for number in range(4):
        engine.add(make(number, 4, 40, background=True))
    for _ in range(6):
        collector.take(engine.step()[0])
    engine.add(make(4, 4, 40, background=False))
    for _ in range(4):
        collector.take(engine.step()[0])
    held = {sequence.id for sequence in engine.scheduler.held}
    assert held == {0, 4}
    ended = [i for i, result in collector.results.items() if result.finish_reasons]
    assert sorted(ended) == [1, 2, 3]
