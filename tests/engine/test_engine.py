"""The engine under random operations, over a model that is a function of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import MAX_PROMPT_ROWS
from kvasir.server.engine.sampling.params import SamplingParams, token_logprobs
from kvasir.server.engine.sampling.speculation import MAX_DRAFTED
from kvasir.server.engine.sequence import FinishReason, Sequence, SequenceStatus
from tests.kit.engine_driver import Collector, make_sequence, run_to_end
from tests.kit.fake_runner import FakeRunner

VOCAB = 50
EOS = 7
BLOCK = 4  # tokens of a block of the prefix cache


def make_engine(
    chunk_size: int = 8,
    cache_blocks: int = 0,
    speculate: bool = False,
    in_one_run: bool = True,
    **options: Any,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(VOCAB, **options)
    runner.kv.steps_are_runs = in_one_run  # for the lengths of drafts alone
    runner.kv.cache = PrefixCache(cache_blocks, BLOCK)
    return Engine(runner, chunk_size=chunk_size, speculate=speculate), runner


def greedy(sequence_id: int, prompt_ids: list[int], max_tokens: int, **params: Any) -> Sequence:
    eos = params.pop("eos", ())
    return make_sequence(
        sequence_id,
        prompt_ids,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
        eos,
    )


def repeating(period: int) -> Callable[[list[int]], int | None]:
    """A model that repeats the token `period` places back, except about every eighth time."""
    return lambda prefix: prefix[-period] if len(prefix) >= period and sum(prefix) % 8 else None


class EngineMachine(RuleBasedStateMachine):
    """Every sequence gets the oracle's tokens and one last output; no row or budget leaks."""

    live = Bundle("live")

    @initialize(
        # With 15 a step could take more prompts than there are rows of floats.
        chunk_size=st.sampled_from([2, 3, 8, 15, 64]),
        max_num_seqs=st.one_of(st.integers(1, 5), st.just(12)),
        room=st.sampled_from([0, 30, 400]),
        int8=st.booleans(),
        cache_blocks=st.sampled_from([0, 1, 3, 8, 100]),
        period=st.sampled_from([None, None, 1, 2, 3]),  # None is without speculation
        in_one_run=st.booleans(),
    )
    def start(
        self,
        chunk_size: int,
        max_num_seqs: int,
        room: int,
        int8: bool,
        cache_blocks: int,
        period: int | None,
        in_one_run: bool,
    ) -> None:
        # By the longest request, whose prompt counts twice, once in floats.
        largest = 30 * (5 if int8 else 2) + 10
        self.engine, self.runner = make_engine(
            chunk_size,
            cache_blocks,
            speculate=period is not None,
            in_one_run=in_one_run,
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget_tokens=largest + room,
            int8=int8,
            next_token=None if period is None else repeating(period),
        )
        self.collector = Collector()
        self.requests: dict[int, Sequence] = {}
        self.aborted: set[int] = set()

    @rule(target=live, n_prompt=st.integers(1, 30), max_tokens=st.integers(0, 10), data=st.data())
    def add(self, n_prompt: int, max_tokens: int, data: st.DataObject) -> int:
        n_shared = data.draw(st.integers(0, n_prompt))
        fresh = st.lists(
            st.integers(0, VOCAB - 1), min_size=n_prompt - n_shared, max_size=n_prompt - n_shared
        )
        prompt_ids = list(range(n_shared)) + data.draw(fresh)
        score = 2 if data.draw(st.booleans()) else None
        sequence = greedy(
            len(self.requests), prompt_ids, max_tokens, prompt_logprobs=score, eos={EOS}
        )
        self.requests[sequence.id] = sequence
        self.engine.add(sequence)
        return sequence.id

    @rule(target=live, n=st.integers(2, 12), token_id=st.integers(0, VOCAB - 1))
    def add_several_short_ones(self, n: int, token_id: int) -> Any:
        sequences = [greedy(len(self.requests) + i, [token_id], 2, eos={EOS}) for i in range(n)]
        for sequence in sequences:
            self.requests[sequence.id] = sequence
            self.engine.add(sequence)
        return multiple(*(sequence.id for sequence in sequences))

    @rule(sequence_id=consumes(live))
    def abort(self, sequence_id: int) -> None:
        output = self.engine.abort(sequence_id)
        if output is not None:
            self.aborted.add(sequence_id)
            self.collector.take([output])
        assert self.engine.abort(sequence_id) is None

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.engine.has_work:
                break
            held = self.engine.scheduler.held
            running = {s.id for s in held if s.status is SequenceStatus.RUNNING}
            outputs, stats = self.engine.step()
            self.collector.take(outputs)
            assert running <= {output.sequence_id for output in outputs}, "a stream waits"
            in_one_run = self.engine.kv.steps_are_runs
            assert stats.n_drafted <= (MAX_DRAFTED if in_one_run or len(running) == 1 else 0)
            assert stats.n_decode + (stats.n_prefill_tokens > 0) >= 1, (
                "a step that does nothing would spin"
            )
            assert stats.n_prefill_tokens <= self.engine.scheduler.chunk_size
            assert 0 <= stats.n_cached <= stats.n_queried
            assert self.engine.kv.cache.capacity or not stats.n_queried
            assert 0 <= stats.n_accepted <= stats.n_drafted

    @invariant()
    def rows_and_reservations_belong_to_their_holders(self) -> None:
        rows, held = self.runner.kv, self.engine.scheduler.held
        assert [sequence.row for sequence in held] == sorted({sequence.row for sequence in held})  # type: ignore[type-var]
        assert len(rows.free_rows) == rows.max_num_seqs - len(held)
        prefilling = [sequence for sequence in held if sequence.status is SequenceStatus.PREFILLING]
        floats = sum(len(sequence.prompt_ids) for sequence in prefilling) * (
            4 // rows.running.dtype.itemsize
        )
        promised = sum(len(s.prompt_ids) + s.params.max_tokens for s in held)
        assert rows.reserved_tokens == promised + floats
        assert rows.reserved_tokens <= rows.committed_tokens <= rows.budget_tokens
        assert len(rows._free_prompts) == min(rows.max_num_seqs, MAX_PROMPT_ROWS) - len(prefilling)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step(1)
        self.rows_and_reservations_belong_to_their_holders()
        assert self.engine.kv.reserved_tokens == 0
        for sequence_id, sequence in self.requests.items():
            self.check(sequence_id, sequence)

    def check(self, sequence_id: int, sequence: Sequence) -> None:
        result = self.collector.results[sequence_id]
        oracle = self.runner.greedy(sequence.prompt_ids, sequence.params.max_tokens)
        if EOS in oracle:
            oracle = oracle[: oracle.index(EOS) + 1]
        assert len(result.finish_reasons) == 1
        if sequence_id in self.aborted:
            assert result.finish_reasons == [FinishReason.ABORT]
            assert result.token_ids == oracle[: len(result.token_ids)]
            return
        assert result.token_ids == oracle
        assert result.finish_reasons == [
            FinishReason.STOP if oracle and oracle[-1] == EOS else FinishReason.LENGTH
        ]
        scored = None
        if sequence.params.prompt_logprobs is not None:
            prefixes = range(1, len(sequence.prompt_ids))
            scored = [
                token_logprobs(
                    self.runner.logits(sequence.prompt_ids[:i]), sequence.prompt_ids[i], 2
                )
                for i in prefixes
            ]
        assert result.prompt_logprobs == scored


EngineMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
test_random_lives = EngineMachine.TestCase


def test_a_large_request_is_overtaken_in_few_steps() -> None:
    """Would catch admission that starves it, because smaller ones always fit."""
    engine, _ = make_engine(max_num_seqs=4, budget_tokens=80)
    engine.add(greedy(0, [1] * 8, 20))
    engine.step()
    engine.add(greedy(1, [2] * 20, 30))
    order: list[int] = []
    for i in range(2, 40):
        engine.add(greedy(i, [3] * 8, 1))  # a step's tokens
        order += [o.sequence_id for o in engine.step()[0] if o.finish_reason]
    while engine.has_work:
        order += [o.sequence_id for o in engine.step()[0] if o.finish_reason]
    assert order[:4] == [2, 3, 4, 0]
    assert engine.kv.reserved_tokens == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_and_eos(ignore_eos: bool) -> None:
    """A stop token ends a sequence whether or not it ignores the model's own ends."""
    engine, runner = make_engine()
    runner.next_token = lambda prefix: [EOS, 9][len(prefix) - 3] if len(prefix) in (3, 4) else 1
    params = SamplingParams(
        max_tokens=20, temperature=0.0, stop_token_ids=frozenset({9}), ignore_eos=ignore_eos
    )
    result = run_to_end(engine, [make_sequence(0, [1], params, eos={EOS})])[0]
    assert result.token_ids == ([1, 1, EOS, 9] if ignore_eos else [1, 1, EOS])
    assert result.finish_reasons == [FinishReason.STOP]


def test_holes_are_filled_when_nobody_waits() -> None:
    """Otherwise the decode window would keep its greatest width."""
    engine, runner = make_engine(chunk_size=8, max_num_seqs=4)
    for i in range(4):
        engine.add(greedy(i, [i], 30))
    collector = Collector()
    for _ in range(6):
        collector.take(engine.step()[0])
    for i in (0, 1, 2):
        engine.abort(i)
    collector.take(engine.step()[0])
    assert [sequence.row for sequence in engine.scheduler.held] == [0]
    while engine.has_work:
        collector.take(engine.step()[0])
    assert collector.results[3].token_ids == runner.greedy([3], 30)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "fits"),
    [
        *((0, 4, False), (60, 5, False), (40, 30, False), (21, 16, False), (23, 6, False)),
        *((2, 62, True), (21, 15, True), (22, 10, True)),
    ],
)
def test_what_can_never_run_is_refused_and_what_just_fits_runs_alone(
    n_prompt: int, max_tokens: int, fits: bool
) -> None:
    engine, runner = make_engine(max_model_len=64, budget_tokens=120, int8=True)
    sequences = [greedy(i, [1] * n_prompt, max_tokens) for i in range(3)]
    if not fits:
        with pytest.raises(ValueError, match=f"{n_prompt} prompt and {max_tokens} new tokens"):
            engine.add(sequences[0])
        assert not engine.has_work
        return
    results = run_to_end(engine, sequences)
    expected = runner.greedy([1] * n_prompt, max_tokens)
    assert [results[i].token_ids for i in range(3)] == [expected] * 3


def test_a_chunk_size_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2, not 1"):
        make_engine(chunk_size=1)


def test_scoring_chunks_keep_the_logits_buffer_bounded() -> None:
    engine = Engine(FakeRunner(2**20, max_model_len=64), chunk_size=64)
    assert engine.scheduler.scoring_chunk_size * 2**20 * 4 == 64 * 2**20


def test_a_sequence_whose_logits_are_no_numbers_ends_alone() -> None:
    engine, runner = make_engine(max_model_len=32)
    broken = greedy(0, [1, 2], 8, logit_bias=dict.fromkeys(range(VOCAB), -np.inf))
    results = run_to_end(engine, [broken, greedy(1, [3], 8)])
    assert results[0].finish_reasons == [FinishReason.ERROR]
    assert results[1].token_ids == runner.greedy([3], 8)
    assert engine.kv.reserved_tokens == 0


def step_stats(engine: Engine, sequences: list[Sequence]) -> list[StepStats]:
    """Add all at once; the figures of all steps until no work is left."""
    for sequence in sequences:
        engine.add(sequence)
    stats = []
    while engine.has_work:
        stats.append(engine.step()[1])
    return stats


@pytest.mark.parametrize(("length", "cached"), [(9, 4), (10, 8), (1, 0)])
def test_a_hit_leaves_two_tokens_to_run(length: int, cached: int) -> None:
    """A run of one token takes another kernel. Blocks are 4 tokens here."""
    engine, runner = make_engine(cache_blocks=50)
    sequences = [greedy(i, list(range(length)), 2) for i in range(2)]
    for sequence in sequences:
        run_to_end(engine, [sequence])
    assert sequences[1].n_cached == cached
    assert sequences[1].output_ids == runner.greedy(list(range(length)), 2)


def test_a_scored_prompt_runs_whole_and_leaves_its_blocks_to_others() -> None:
    engine, runner = make_engine(cache_blocks=50)
    ids = list(range(11))
    first, scored, last = (
        greedy(0, ids[:6], 1),
        greedy(1, ids, 0, prompt_logprobs=0),
        greedy(2, ids, 1),
    )
    stats = [step_stats(engine, [sequence]) for sequence in (first, scored, last)]
    assert [sum(s.n_prefill_tokens for s in steps) for steps in stats] == [6, 11, 3]
    assert [sum(s.n_queried for s in steps) for steps in stats] == [6, 0, 11]
    assert [s.n_cached for s in (first, scored, last)] == [0, 0, 8]
    assert last.output_ids == runner.greedy(ids, 1)


def test_what_was_generated_is_not_kept() -> None:
    """Decoding and prefill write different bits."""
    engine, _ = make_engine(cache_blocks=50)
    first = greedy(0, [1, 2, 3, 4, 5, 6], 20)
    run_to_end(engine, [first])
    second = greedy(1, first.token_ids, 1)
    run_to_end(engine, [second])
    assert second.n_cached == BLOCK


@pytest.mark.parametrize("seed", range(2))
def test_sampled_tokens_and_logprobs_are_those_of_one_step_a_token(seed: int) -> None:
    """With penalties and several sequences: would catch a random draw lost or made twice."""
    results, n_steps = [], []
    for speculate in (False, True):
        engine, runner = make_engine(
            speculate=speculate, next_token=repeating(2 + seed), max_num_seqs=3
        )
        requests = []
        for i in range(6):
            filters = {"top_p": 0.9, "presence_penalty": i / 6, "seed": seed + i}
            params = SamplingParams(max_tokens=25, temperature=0.9, logprobs=2, **filters)  # type: ignore[arg-type]
            requests.append(make_sequence(i, [1 + i, 2, 3, 4] * 2, params, eos={EOS}))
        results.append(run_to_end(engine, requests))
        n_steps.append(len(runner.batches))
    assert results[0] == results[1]
    assert n_steps[1] < n_steps[0], "no draft was right"
