"""Encoder-decoders in the engine, over a runner that generates without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.kv.source_rows import SourceRows
from kvasir.server.engine.sampling.beams import BeamSearch
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams
from kvasir.server.engine.sequence import Sequence
from tests.kit.engine_driver import Collector, run_to_end
from tests.kit.fake_seq2seq import EOS, FakeSeq2SeqRunner, read, small_config, small_model

MODEL = small_model(small_config())


def make_engine(chunk_size: int = 32, **limits: int) -> Engine:
    runner = FakeSeq2SeqRunner(MODEL, **limits)
    return Engine(runner, chunk_size=chunk_size, itl_target=0.0, clock=lambda: 0.0)


def make_sequence(i: int, **params: Any) -> Sequence:
    """Source i; greedy unless told otherwise."""
    generator = np.random.default_rng(i)
    source = generator.integers(4, MODEL.config.vocab_size, size=generator.integers(1, 24)).tolist()
    chosen = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "seed": i, **params})
    prefix = list(MODEL.config.target_prefix)
    return Sequence(i, source, chosen, frozenset({EOS}), 0.0, target_prefix=prefix)


def expected(sequence: Sequence, model: Transformer = MODEL) -> list[int]:
    params = sequence.params
    return generate(
        model,
        sequence.target_prefix,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        seed=params.seed,
        ending_ids=sequence.ending_ids,
        source=read(model, sequence.prompt_ids),
    )


@pytest.mark.parametrize("n_ending", [1, 40, 1024])
def test_a_step_of_a_search_with_many_tokens_that_end_it(n_ending: int) -> None:
    """Against a sort of all that may follow; a request may name 1,024 such tokens."""
    generator = np.random.default_rng(n_ending)
    ending = frozenset(generator.choice(5000, n_ending, replace=False).tolist())
    params = BeamParams(width=16)
    search = BeamSearch(params, ending, n_given=1, max_tokens=9)
    for n_tokens in range(1, 4):
        logits = generator.standard_normal((len(search.running), 5000)).astype(np.float32)
        logits[:, [*ending]] += 1.0
        scores = np.array([text.score for text in search.running])[:, None]
        scores = scores + logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        best = np.argsort(-scores, axis=None).tolist()
        going = [one for one in best if one % 5000 not in ending][: params.width]
        texts = [(search.running[one // 5000].token_ids, one % 5000) for one in going]
        ended = [one for one in best[: params.width] if one % 5000 in ending]
        found = [text.score for text in search.finished]
        found += [scores.flat[one] / n_tokens for one in ended]
        assert not search.advance(logits) or len(found) >= params.width
        if len(found) >= params.width:
            break
        assert {(*text.token_ids,) for text in search.running} == {(*a, b) for a, b in texts}
        expected = sorted(found, reverse=True)
        assert [text.score for text in search.finished] == pytest.approx(expected, abs=1e-4)


def test_sources_are_whole_and_fill_a_step() -> None:
    """Also one that is longer than a step has tokens."""
    engine = make_engine(chunk_size=8, max_num_seqs=9)
    sequences = [make_sequence(i, max_tokens=1) for i in range(9)]
    for sequence, length in zip(sequences, [3, 4, 2, 20, 1, 8, 7, 1, 1], strict=True):
        sequence.prompt_ids = [5] * length
    run_to_end(engine, sequences)
    assert isinstance(engine.runner, FakeSeq2SeqRunner)
    assert [lengths for lengths in engine.runner.encoded if lengths] == [
        *([3, 4], [2], [20], [1], [8], [7, 1], [1])
    ]


def test_penalties_count_the_target_alone() -> None:
    """Not the source, in which all likely tokens are."""
    free = make_sequence(0, max_tokens=8)
    free.ending_ids = frozenset()
    greedy = run_to_end(make_engine(), [free])[0].token_ids
    again = make_sequence(0, max_tokens=8, repetition_penalty=100.0)
    again.ending_ids = frozenset()
    again.target_prefix = [3, greedy[0]]
    found = run_to_end(make_engine(), [again])[0].token_ids
    assert len(set(found)) == len(found)
    assert not set(found) & {3, greedy[0]}
    assert set(found) & set(again.prompt_ids)


def test_the_budget_counts_sources_and_targets() -> None:
    engine = make_engine(budget_tokens=46)
    sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        sequence.prompt_ids = [5] * 10  # 10 + 1 + 12 tokens
        engine.add(sequence)
    engine.step()
    assert len(engine.scheduler.held) == 2
    assert engine.occupancy == (2, 1.0)
    searching = make_sequence(9, beams=BeamParams(3))
    searching.prompt_ids = [5] * 10
    with pytest.raises(ValueError, match="cannot fit"):
        engine.add(searching)
    engine.abort(0)
    engine.step()
    assert [sequence.id for sequence in engine.scheduler.held] == [2, 1]


@pytest.mark.parametrize(
    ("n_source", "max_tokens", "fits"), [(24, 19, True), (25, 1, False), (1, 20, False)]
)
def test_source_and_target_have_limits_of_their_own(
    n_source: int, max_tokens: int, fits: bool
) -> None:
    engine, sequence = make_engine(), make_sequence(0, max_tokens=max_tokens)
    sequence.prompt_ids = [5] * n_source
    if fits:
        assert run_to_end(engine, [sequence])[0].token_ids == expected(sequence)
    else:
        with pytest.raises(ValueError, match="cannot fit"):
            engine.add(sequence)


def test_a_row_takes_over_no_token_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sequence = make_engine(), make_sequence(3, beams=BeamParams(4))
    engine.add(sequence)
    copied = list[tuple[int, int]]()
    assert isinstance(engine.kv, SourceRows)
    copy = engine.kv.copy

    def note(source: int, target: int, start: int, end: int) -> None:
        copied.append((start, end))
        copy(source, target, start, end)

    monkeypatch.setattr(engine.kv, "copy", note)
    while engine.has_work:
        engine.step()
    starts = [start for start, _ in copied]
    assert starts[:3] == [0, 0, 0]
    assert all(0 < start < end for start, end in copied[3:])
    assert max(starts) > 1


def test_rows_are_moved_with_their_sources() -> None:
    """A search goes on in front once the others have ended, and finds the same."""
    params: dict[str, Any] = {"beams": BeamParams(2), "max_tokens": 9}
    alone = run_to_end(make_engine(), [make_sequence(7, **params)])[7]
    engine, search = make_engine(chunk_size=200, max_num_seqs=8), make_sequence(7, **params)
    for sequence in (*(make_sequence(i, max_tokens=1) for i in range(6)), search):
        engine.add(sequence)
    rows, collector = set[int](), Collector()
    while engine.has_work:
        collector.take(engine.step()[0])
        rows.update(search.rows)
    assert rows == {0, 1, 6, 7}
    assert collector.results[7] == alone
