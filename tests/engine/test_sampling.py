"""The vectorised sampler against the definitions, one row at a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.server.engine.sampling import sampler
from kvasir.server.engine.sampling.params import Floats, SamplingParams, token_logprobs
from kvasir.server.engine.sequence import Sequence
from tests.kit.engine_driver import sampled_sequence

SHARES = ("top_p", "min_p", "typical_p")
VOCAB = 700  # more than two of the sampler's blocks, and not a whole number of them


def kept_by_definition(logits: NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """Token → probability after temperature, top-k, top-p, min-p and typical-p; keeps ties."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = {i: math.exp(x - scaled.max()) for i, x in enumerate(scaled)}
    likeliest_first = sorted(weights, key=lambda i: -weights[i])
    if 0 < params.top_k < len(weights):
        last = likeliest_first[params.top_k - 1]
        likeliest_first = [i for i in likeliest_first if weights[i] >= weights[last]]
    if params.top_p < 1.0:
        total = sum(weights[i] for i in likeliest_first)
        mass = 0.0
        for last in likeliest_first:
            mass += weights[last]
            if mass >= params.top_p * total:
                break
        likeliest_first = [i for i in likeliest_first if weights[i] >= weights[last]]
    likeliest_first = [i for i in likeliest_first if weights[i] >= params.min_p]
    if params.typical_p < 1.0:
        total = sum(weights[i] for i in likeliest_first)
        surprise = {i: -math.log(weights[i] / total) for i in likeliest_first}
        entropy = sum(weights[i] / total * surprise[i] for i in likeliest_first)
        mass, typical = 0.0, []
        for i in sorted(likeliest_first, key=lambda i: abs(surprise[i] - entropy)):
            typical.append(i)
            mass += weights[i] / total
            if mass >= params.typical_p:
                break
        likeliest_first = typical
    total = sum(weights[i] for i in likeliest_first)
    return {i: weights[i] / total for i in likeliest_first}


def draws_by_definition(
    logits: NDArray[np.float32], params: SamplingParams, n: int
) -> list[set[int]]:
    """The token of each sample index below n; several where float32 cannot decide."""
    errors = (-1e-6, 0.0, 1e-6)
    uniforms = [replace(params, sample_index=i).generator().random() for i in range(n)]
    draws: list[set[int]] = [set() for _ in range(n)]
    for error in errors:
        shares = {s: min(getattr(params, s) * (1 + error), 1.0) for s in SHARES}
        kept = kept_by_definition(logits, replace(params, **shares))
        ids = sorted(i for i in kept if kept[i])
        running = list(accumulate(kept[i] for i in ids))
        for found, uniform in zip(draws, uniforms, strict=True):
            places = (bisect_right(running, uniform + other) for other in errors)
            found |= {ids[min(place, len(ids) - 1)] for place in places}
    return draws


def random_logits(seed: int, rows: int = 1) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def logits_of_shape(shape: str, seed: int, vocab: int) -> NDArray[np.float32]:
    """[vocab]: rows that take different ways to a nucleus."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(vocab) * {"flat": 0.5, "constant": 0.0}.get(shape, 2.0)
    if shape == "peaked":
        logits[generator.permutation(vocab)[:30]] += np.linspace(14, 5, 30)[:vocab]
    elif shape == "tied":
        logits = np.round(logits)
    elif shape == "banned":
        logits[generator.permutation(vocab)[: vocab - 1 - vocab // 3]] = -np.inf
    elif shape == "striped":  # a sample at regular places misleads
        logits = logits / 4 + generator.integers(0, 12, 6)[np.arange(vocab) % 6]
    return logits.astype(np.float32)


def sample(logits: Floats, sequences: list[Sequence]) -> list[int | None]:
    return [sampler.sample(row, one) for row, one in zip(logits, sequences, strict=True)]


@settings(max_examples=60)
@given(
    shape=st.sampled_from(["flat", "middling", "peaked", "tied", "constant", "banned", "striped"]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    vocab=st.sampled_from([1, 300, 2049, 5000, 6144]),
    temperature=st.sampled_from([0.1, 0.8, 2.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 50, 4000]),
    top_p=st.sampled_from([1e-18, 1e-3, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1 - 1e-16]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
@example(  # the sample misses the place
    shape="striped", typical_p=1.0, vocab=5000, temperature=0.8, top_k=0, top_p=0.5, min_p=0.0,
    seed=2,
)  # fmt: skip
def test_drawn_tokens_equal_the_definition(
    shape: str, typical_p: float, vocab: int, seed: int, **filters: Any
) -> None:
    """Vocabularies both smaller and larger than the sample that locates the end of a nucleus."""
    logits = logits_of_shape(shape, seed % 2**32, vocab)
    if vocab <= 300 and shape not in ("tied", "constant", "banned"):
        filters["typical_p"] = typical_p  # whose definition keeps no ties, near ones included
    params = SamplingParams(max_tokens=1, seed=seed, **filters)
    sequences = [sampled_sequence(replace(params, sample_index=i)) for i in range(12)]
    tokens = sample(np.tile(logits, (12, 1)), sequences)
    for token, expected in zip(tokens, draws_by_definition(logits, params, 12), strict=True):
        assert token in expected


@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.4}, {"typical_p": 0.4}, {"min_p": 0.5}]
)
@pytest.mark.parametrize("vocab", [8, 6000])
def test_ties_at_a_threshold_are_all_kept(filters: dict[str, float], vocab: int) -> None:
    """Would catch a filter that prefers small ids: two of three equal tokens would do."""
    logits = np.full((1, vocab), -30.0, dtype=np.float32)
    logits[0, [1, 4, 7]] = 2.0
    sequence = sampled_sequence(SamplingParams(max_tokens=1, seed=3, **filters))  # type: ignore[arg-type]
    assert {sample(logits, [sequence])[0] for _ in range(100)} == {1, 4, 7}


def test_greedy_takes_the_likeliest_and_leaves_the_logits_alone() -> None:
    logits = random_logits(0, 3)
    before = logits.copy()
    greedy = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={5: 100.0})
    plain = replace(greedy, logit_bias={})
    assert sample(logits, [sampled_sequence(p) for p in (plain, greedy, plain)]) == [
        int(before[0].argmax()),
        5,
        int(before[2].argmax()),
    ]
    assert np.array_equal(logits, before)


def test_penalties_and_bias_by_definition() -> None:
    logits = random_logits(3)
    params = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        repetition_penalty=1.7,
        frequency_penalty=0.4,
        presence_penalty=0.9,
        logit_bias={8: -2.5},
    )
    output_ids = [3, 8, 8, 650]
    expected = logits[0].astype(np.float64)
    for token in (1, 2, 3, 8, 650):  # prompt and output
        expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
    for token in set(output_ids):
        expected[token] -= 0.4 * output_ids.count(token) + 0.9
    expected[8] -= 2.5
    for _ in range(40):  # compare the whole order: ban the winner, ask again
        token = int(expected.argmax())
        assert sample(logits, [sampled_sequence(params, output_ids)]) == [token]
        expected[token] = -np.inf
        params = replace(params, logit_bias={**params.logit_bias, token: -1e9})


@pytest.mark.parametrize("n_output", [0, 1, 2, 3])
def test_min_tokens_bans_endings_until_there_are_enough(n_output: int) -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 9] = 10.0
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2)
    token = sample(logits, [sampled_sequence(params, [4] * n_output, {9})])[0]
    assert (token == 9) == (n_output >= 2)


def test_seed_and_sample_index_choose_the_stream() -> None:
    def stream(seed: int, sample_index: int) -> tuple[float, ...]:
        params = SamplingParams(max_tokens=1, seed=seed, sample_index=sample_index)
        return tuple(params.generator().random(4))

    assert stream(1, 0) == stream(1, 0)
    assert len({stream(seed, i) for seed in (1, 2, -1) for i in (0, 1)}) == 6


@given(
    seed=st.integers(0, 500),
    alternatives=st.sampled_from([0, 1, 5, 20]),
    size=st.sampled_from([VOCAB, 1024, 3000]),  # fewer than one, one, and several a group
)
def test_token_logprobs_are_a_log_softmax(seed: int, alternatives: int, size: int) -> None:
    row = np.resize(random_logits(seed)[0], size)  # ties
    expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    found = token_logprobs(row, token_id=3, alternatives=alternatives)
    assert found.logprob == pytest.approx(expected[3], abs=1e-5)
    order = sorted(range(size), key=lambda i: (-row[i], i))[:alternatives]
    assert [i for i, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_penalties_keep_up_with_a_growing_output() -> None:
    """Would catch occurrences that are not counted, or twice."""
    params = SamplingParams(
        max_tokens=99,
        temperature=0.0,
        repetition_penalty=1.3,
        frequency_penalty=0.6,
        presence_penalty=-0.3,
    )
    growing = sampled_sequence(params)
    for step in range(40):
        logits = random_logits(step % 3)  # the same winners come back
        chosen = sample(logits, [growing])
        assert chosen == sample(logits, [sampled_sequence(params, growing.output_ids)])
        growing.output_ids += [token for token in chosen if token is not None]
