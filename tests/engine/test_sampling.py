"""The vectorised sampler against the definitions, one row at a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

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


filters = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 3.0),
        "top_k": st.sampled_from([0, 1, 2, 17, VOCAB, VOCAB + 5]),
        "top_p": st.sampled_from([1e-18, 0.05, 0.5, 0.9, 0.999, 1.0]),
        "typical_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)


@settings(max_examples=60)
@given(rows=st.lists(filters, min_size=1, max_size=5), seed=st.integers(0, 2**64 - 1))
def test_drawn_tokens_equal_the_definition_row_by_row(
    rows: list[dict[str, float]], seed: int
) -> None:
    logits = random_logits(seed % 1000, len(rows))
    params = [SamplingParams(max_tokens=1, seed=seed + i, **row) for i, row in enumerate(rows)]  # type: ignore[arg-type]
    tokens = sample(logits, [sampled_sequence(p) for p in params])
    for token, row, p in zip(tokens, logits, params, strict=True):
        assert token in draws_by_definition(row, p, 1)[0]


@settings(max_examples=80)
@given(
    shape=st.sampled_from(["flat", "middling", "peaked", "tied", "constant", "banned", "striped"]),
    vocab=st.sampled_from([1, 300, 2049, 5000, 6144]),
    temperature=st.sampled_from([0.1, 0.8, 2.0]),
    top_k=st.sampled_from([0, 0, 0, 50, 4000]),
    top_p=st.sampled_from([1e-18, 1e-3, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1 - 1e-16]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
@example(  # the sample misses the place
    shape="striped", vocab=5000, temperature=0.8, top_k=0, top_p=0.5, min_p=0.0, seed=2
)
def test_a_nucleus_is_the_smallest_whatever_the_distribution(
    shape: str, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Vocabularies both smaller and larger than the sample that locates its end."""
    logits = logits_of_shape(shape, seed, vocab)
    params = SamplingParams(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
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


def test_draws_follow_the_distribution() -> None:
    """Would catch a generator that is restarted for every token, or a biased search."""
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float32))
    sequence = sampled_sequence(SamplingParams(max_tokens=1, seed=7))
    tokens = [sample(logits, [sequence])[0] for _ in range(4000)]
    drawn = np.array([tokens.count(i) for i in range(4)]) / 4000
    assert np.abs(drawn - [0.5, 0.25, 0.125, 0.125]).max() < 0.03  # four standard deviations


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_token_to_choose_is_told_apart_from_its_neighbours(
    temperature: float, broken: float
) -> None:
    """An overflow of the model or a ban of every token does not end the other sequences."""
    logits = random_logits(0, 3)
    params = SamplingParams(max_tokens=1, temperature=temperature)
    expected = sample(logits, [sampled_sequence(params) for _ in range(3)])
    logits[1] = broken
    assert sample(logits, [sampled_sequence(params) for _ in range(3)]) == [
        expected[0],
        None,
        expected[2],
    ]
