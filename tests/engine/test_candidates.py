"""Tokens from candidates against `sample` and `token_logprobs` on whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir.server.engine.sampling.candidates import candidate_logprobs, choose
from kvasir.server.engine.sampling.logits import Candidates
from kvasir.server.engine.sampling.params import Floats, SamplingParams, token_logprobs
from kvasir.server.engine.sampling.sampler import sample
from tests.kit.engine_driver import sampled_sequence

K = 128


def candidates_of(
    logits: Floats, params: list[SamplingParams], generator: np.random.Generator
) -> Candidates:
    """The oracle of the graph's tail, which orders ties at random."""
    packed = []
    for row, of in zip(logits.astype(np.float64), params, strict=True):
        order = np.lexsort((generator.random(row.size), -row))[:K]
        with np.errstate(invalid="ignore"):
            total, tempered = (
                np.log(np.exp((row - row.max()) / t).sum()) for t in (1.0, of.temperature or 1.0)
            )
            totals = [total + row.max(), *[tempered] * (len(order) - 1)]
        packed.append([*totals, *row[order], *order])
    return Candidates.unpack(np.array(packed, dtype=np.float32))


def random_rows(generator: np.random.Generator, n: int, vocab: int) -> Floats:
    """Rows flat and peaked; half of them rounded to bfloat16, which ties."""
    scales = generator.choice([0.0, 0.3, 1.0, 2.5, 6.0], size=(n, 1))
    rows = (generator.standard_normal((n, vocab)) * scales).astype(np.float32)
    rows[generator.random(n) < 0.3, : int(generator.integers(1, 60))] += 9
    rounded = rows.view(np.uint32) & np.uint32(0xFFFF0000)
    found: Floats = np.where(generator.random((n, 1)) < 0.5, rounded.view(np.float32), rows)
    return found


def random_params(generator: np.random.Generator) -> SamplingParams:
    """Any parameters, most of them off."""

    def maybe(off: Any, *values: Any) -> Any:
        return values[generator.integers(len(values))] if generator.random() < 0.4 else off

    return SamplingParams(
        max_tokens=9,
        min_tokens=maybe(0, 0, 0, 3),
        temperature=maybe(1.0, 0.0, 0.0, 0.3, 0.7, 0.9, 1.3, 2.0),
        top_k=int(maybe(0, 1, 5, 40, 127, 128, 129, 500, 5000)),
        top_p=float(maybe(1.0, 0.1, 0.5, 0.9, 0.95, 0.999)),
        min_p=float(maybe(0.0, 0.02, 0.1, 0.5, 1.0)),
        typical_p=float(maybe(1.0, 1.0, 1.0, 0.5)),
        repetition_penalty=float(maybe(1.0, 1.0, 1.0, 1.2)),
        frequency_penalty=float(maybe(0.0, 0.0, 0.0, 0.5)),
        logit_bias=maybe({}, {}, {}, {7: 3.0}),
        seed=int(generator.integers(99)),
    )


@pytest.mark.parametrize("vocab", [100, 300, 5000])
def test_tokens_and_random_numbers_are_those_of_whole_rows(vocab: int) -> None:
    """All parameters in mixed batches; ties; what is undecided has drawn no random number."""
    generator = np.random.default_rng(vocab)
    n_known = {"greedy": [0, 0], "drawn": [0, 0]}
    for _ in range(60):
        n = int(generator.integers(1, 9))
        logits = random_rows(generator, n, vocab)
        params = [random_params(generator) for _ in range(n)]
        candidates = candidates_of(logits, params, generator)
        outputs = [generator.integers(vocab, size=generator.integers(6)).tolist() for _ in range(n)]
        here, there = (
            [sampled_sequence(*pair, {4}) for pair in zip(params, outputs, strict=True)]
            for _ in range(2)
        )
        for _ in range(3):
            found = choose(candidates, list(enumerate(here)), vocab)
            for i, (a, b) in enumerate(zip(here, there, strict=True)):
                expected = sample(logits[i], b)
                token = found[i] if i in found else sample(logits[i], a)
                assert token == expected, params[i]
                assert expected is not None
                counted = n_known["drawn" if params[i].temperature else "greedy"]
                counted[0] += i in found
                counted[1] += 1
                alternatives = int(generator.integers(21))
                whole = token_logprobs(logits[i], expected, alternatives)
                if logprobs := candidate_logprobs(candidates, i, expected, alternatives):
                    assert (logprobs.token_id, logprobs.rank) == (expected, whole.rank)
                    assert [t for t, _ in logprobs.top] == [t for t, _ in whole.top]
                    values = [value for _, value in logprobs.top]
                    assert values == pytest.approx([value for _, value in whole.top], abs=1e-5)
                    assert logprobs.logprob == pytest.approx(whole.logprob, abs=1e-5)
    assert n_known["greedy"][0] > 0.3 * n_known["greedy"][1]
    assert vocab == 100 or n_known["drawn"][0] > 0.1 * n_known["drawn"][1]


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.7},
        {"top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.05},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    ],
)
def test_a_peaked_row_is_decided(filters: dict[str, Any]) -> None:
    """As those of trained models are: would catch a bound that lets all rows be read whole."""
    generator = np.random.default_rng(5)
    logits = (generator.standard_normal((100, 5000)) * 3).astype(np.float32)
    logits[:, :30] += 12
    params = [SamplingParams(max_tokens=1, seed=i, **filters) for i in range(100)]
    sequences = [sampled_sequence(of) for of in params]
    candidates = candidates_of(logits, params, generator)
    assert len(choose(candidates, list(enumerate(sequences)), 5000)) >= 95


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_finite_logits_are_read_whole(broken: float, temperature: float) -> None:
    generator = np.random.default_rng(0)
    logits = random_rows(generator, 3, 300)
    logits[1] = broken
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=3)
    sequences = [sampled_sequence(params) for _ in range(3)]
    candidates = candidates_of(logits, [params] * 3, generator)
    found = choose(candidates, list(enumerate(sequences)), 300)
    assert 1 not in found
    assert sample(logits[1], sequences[1]) is None
