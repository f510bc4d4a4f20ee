"""The runner: prompts that share a run against the same prompts alone, and its budget."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.model_runner import group_neighbours
from kvasir.server.engine.row_binding import RowBinding
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import Floats, SamplingParams
from kvasir.server.engine.sampling.speculation import Speculation
from kvasir.server.engine.sequence import Sequence
from tests.kit.engine_driver import Collector, Result, make_sequence, run_to_end
from tests.kit.random_models import RandomModel


def prompt_in_row(runner: OnnxRunner, prompt_ids: list[int]) -> Sequence:
    sequence = make_sequence(0, prompt_ids, SamplingParams(max_tokens=1))
    admitted = runner.kv.admit(len(prompt_ids), 1, [])
    sequence.rows = [admitted[0]] if admitted else []
    return sequence


def whole(sequence: Sequence, n_logits: int = 1) -> Chunk:
    return Chunk(sequence, 0, len(sequence.prompt_ids), n_logits)


@pytest.mark.parametrize("model", ["random_model", "random_int8_model"])
@pytest.mark.parametrize("lengths", [(20, 20), (20, 17, 20), (2, 1, 2), (30, 4, 28), (5, 6, 7, 8)])
def test_prompts_that_share_a_run_are_what_they_are_alone(
    model: str, lengths: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """Logits, keys and values are the same bits with any neighbours and padding."""
    random: RandomModel = request.getfixturevalue(model)
    generator = np.random.default_rng(sum(lengths))
    prompts = [generator.integers(random.config.vocab_size, size=n).tolist() for n in lengths]
    together, alone = (random.runner(max_num_seqs=len(lengths)) for _ in range(2))
    chunks = [whole(prompt_in_row(together, prompt)) for prompt in prompts]
    logits = together.run(StepBatch(prefills=chunks))[:].copy()
    assert len(logits) == len(lengths)
    for i, prompt in enumerate(prompts):
        sequence = prompt_in_row(alone, prompt)
        expected = alone.run(StepBatch(prefills=[whole(sequence)]))[:]
        assert (logits[i] == expected[0]).all()
        found, same = (r.kv.prompts.array[:, i, :, : len(prompt)] for r in (together, alone))
        assert (found == same).all()


def test_a_kernel_for_a_lone_token_shows_in_no_answer(
    random_int4_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On x86 without AVX-512, int4 products give one token of a block of 128 other bits.

    A run's logits show that here on any CPU: 129 tokens of a prompt, or three times 43, leave one
    alone, and so does a sequence that decodes by itself. Not every token and position shows it.
    """
    run = RowBinding.run

    def run_otherwise(
        self: RowBinding,
        ends: list[int],
        length: int,
        indices: list[int],
        logits: Floats,
        first: int,
    ) -> float:
        seconds: float = run(self, ends, length, indices, logits, first)
        last = len(ends) * length - 1
        shows = self.input_ids[last] > 0 and self.position_ids[last] > 0
        if last % 128 == 0 and last in indices and shows:
            logits[first + indices.index(last)] *= 1.001
        return seconds

    monkeypatch.setattr(RowBinding, "run", run_otherwise)
    lengths = (43, 43, 43, 129, 129, 1)

    def requests() -> list[Sequence]:
        scored = [None, None, None, 2, None, None]
        return [
            make_sequence(
                i,
                np.random.default_rng(i).integers(300, size=n).tolist(),
                SamplingParams(max_tokens=3 + i, logprobs=2, prompt_logprobs=scored[i]),
            )
            for i, n in enumerate(lengths)
        ]

    alone = Engine(random_int4_model.runner(max_num_seqs=1), chunk_size=200)
    expected = [run_to_end(alone, [sequence])[i] for i, sequence in enumerate(requests())]
    for chunk_size in (200, 64, 128):
        together = Engine(random_int4_model.runner(max_num_seqs=5), chunk_size=chunk_size)
        results = run_to_end(together, requests())
        assert [results[i] for i in range(len(lengths))] == expected


def test_prompts_of_nearly_one_length_in_neighbouring_rows_share_a_run(
    random_model: RandomModel,
) -> None:
    """Would catch batching that never happens."""
    runner = random_model.runner(max_num_seqs=8)
    rows = [prompt_in_row(runner, [1] * n) for n in (9, 10, 10, 2, 2, 1, 8, 8)]
    scored = Chunk(rows[7], 0, 8, 8)
    groups = group_neighbours([*map(whole, rows[:7]), scored], runner._pad_into_one_run)
    # A prompt of one token is alone, and so is one that wants logits of all of it.
    assert [len(group) for group in groups] == [3, 2, 1, 1, 1]
    far = [whole(rows[0]), whole(rows[2])]
    assert [len(group) for group in group_neighbours(far, runner._pad_into_one_run)] == [1, 1]


@pytest.mark.parametrize(("n_spare", "runs"), [(0, [1, 1]), (3, [2])])
def test_prompts_are_padded_where_the_budget_has_room(
    random_int8_model: RandomModel, n_spare: int, runs: list[int]
) -> None:
    """Padding takes memory like any other token."""
    lengths = (17, 20)
    runner = random_int8_model.runner(
        kv_cache_bytes=2 * 2 * 2 * 32 * (sum(lengths) * 5 + 2 + n_spare * 4)
    )
    chunks = [whole(prompt_in_row(runner, [1] * n)) for n in lengths]
    assert [
        len(together) for together in group_neighbours(chunks, runner._pad_into_one_run)
    ] == runs


@pytest.mark.parametrize(("model", "weight"), [("random_model", 1), ("random_int8_model", 4)])
def test_the_budget_is_of_bytes_and_a_prompts_floats_count(
    model: str, weight: int, request: pytest.FixtureRequest
) -> None:
    random: RandomModel = request.getfixturevalue(model)
    token_bytes = 2 * 2 * 2 * 32 * 4 // weight  # keys and values of 2 layers, 2 heads, 32 numbers
    budget = token_bytes * (50 + 40 * weight)
    runner = random.runner(kv_cache_bytes=budget)
    engine = Engine(runner, chunk_size=32)
    engine.add(make_sequence(0, [1] * 40, SamplingParams(max_tokens=10)))
    with pytest.raises(ValueError, match="40 prompt and 11 new tokens cannot fit"):
        engine.add(make_sequence(1, [1] * 40, SamplingParams(max_tokens=11)))
    while engine.has_work:
        engine.step()
        assert runner.kv.committed_tokens * token_bytes <= budget
    assert runner.kv.committed_tokens == 50 + 40 * weight


@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_a_prompt_of_full_length_fits_the_default_budget(
    random_int8_model: RandomModel, max_num_seqs: int
) -> None:
    """The default is at most what the rows can hold, however much memory is free."""
    runner = random_int8_model.runner(max_num_seqs=max_num_seqs, kv_cache_bytes=None)
    assert runner.kv.admit(runner.max_model_len, 0, []) == (0, 0)
    assert runner.kv.budget_tokens == (max_num_seqs + 4) * runner.max_model_len


class _Foreknowing(Speculation):
    """Drafts the known tokens in two steps of three, one token in six wrong."""

    def __init__(self, token_ids: list[int], seed: int) -> None:
        super().__init__([])
        self._known = token_ids
        self._random = np.random.default_rng(seed)

    @property
    def hit_rate(self) -> float:
        return float(self._random.random() < 0.67)

    def draft(self, n_tokens: int) -> list[int]:
        ahead = self._known[len(self._own.text) :][: int(self._random.integers(n_tokens + 1))]
        return [token if self._random.random() < 0.83 else 7 for token in ahead]


def generate(model: RandomModel, known: dict[int, Result] | None = None) -> dict[int, Result]:
    """Four sequences of different lengths; with drafts if the results are known already."""
    generator = np.random.default_rng(5)
    sequences = []
    for i, n_prompt in enumerate((9, 30, 70, 20)):
        prompt_ids = generator.integers(model.config.vocab_size, size=n_prompt).tolist()
        sequences.append(
            make_sequence(i, prompt_ids, SamplingParams(max_tokens=60, temperature=0.0, logprobs=0))
        )
        if known:
            speculation = _Foreknowing(known[i].token_ids, seed=i)
            sequences[-1].speculation = speculation
    engine, collector, stats = Engine(model.runner(), chunk_size=32), Collector(), []
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        outputs, step = engine.step()
        collector.take(outputs)
        stats.append(step)
    assert any(0 < s.n_accepted < s.n_drafted for s in stats) == bool(known)
    return collector.results


@pytest.mark.parametrize(("model", "error"), [("random_model", 1e-4), ("random_int8_model", 0.1)])
def test_drafts_beside_decodes_give_the_same_tokens_but_for_rounding(
    model: str, error: float, request: pytest.FixtureRequest
) -> None:
    """Would catch wrong masks or positions of drafts, and keys that the decode run destroys."""
    random: RandomModel = request.getfixturevalue(model)
    expected = generate(random)
    found = generate(random, expected)
    for i in expected:
        assert found[i].token_ids == expected[i].token_ids
        for one, other in zip(found[i].logprobs, expected[i].logprobs, strict=True):
            assert one is not None
            assert other is not None
            assert math.isclose(one.logprob, other.logprob, abs_tol=error)


def test_decodes_are_timed_apart_from_prompts(random_model: RandomModel) -> None:
    runner = random_model.runner()
    engine = Engine(runner, chunk_size=32)
    engine.add(make_sequence(0, [1] * 9, SamplingParams(max_tokens=9)))
    engine.step()
    assert runner.decode_seconds == 0.0 < runner.model_seconds
    prompts = runner.model_seconds
    engine.step()
    assert runner.decode_seconds == pytest.approx(runner.model_seconds - prompts)
    engine.add(make_sequence(1, [1] * 9, SamplingParams(max_tokens=9)))
    decodes = runner.decode_seconds
    engine.step()
    assert decodes < runner.decode_seconds < runner.model_seconds - prompts


def test_a_run_beyond_the_end_of_a_row_is_refused(random_model: RandomModel) -> None:
    """ONNX Runtime would write to the next row without a word."""
    runner = random_model.runner(max_num_seqs=1)
    sequence = prompt_in_row(runner, [1, 2])
    end = runner.kv.prompts.n_positions
    chunk = Chunk(sequence, end - 1, 2, 1)
    sequence.prompt_ids = [1] * (end + 1)
    with pytest.raises(ValueError, match=f"cannot hold {end + 1} tokens"):
        runner.run(StepBatch(prefills=[chunk]))
