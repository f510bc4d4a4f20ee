"""Generation's oracle against definitions: the chain of argmaxes, and draw()'s distribution."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.model.reference import draw, generate, next_logits
from tests.kit.random_models import make_config, make_decoder

# Untied: tied random weights repeat the last token for ever.
CONFIG = make_config(max_model_len=40, tied_embeddings=False)
decoder = make_decoder(CONFIG)
PROMPT = [5, 17, 3]


def kept_probabilities(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> dict[int, float]:
    """Return token → probability of the k likeliest, and of these the fewest that reach top_p."""
    weights = np.exp(logits.astype(np.float64) / temperature - logits.max() / temperature)
    likeliest_first = sorted(
        range(len(logits)), key=lambda token_id: (-weights[token_id], token_id)
    )
    if top_k:
        likeliest_first = likeliest_first[:top_k]
    total = sum(weights[token_id] for token_id in likeliest_first)
    nucleus: list[int] = []
    for token_id in likeliest_first:
        nucleus.append(token_id)
        if top_p < 1.0 and sum(weights[i] for i in nucleus) >= top_p * total:
            break
    return {token_id: weights[token_id] / sum(weights[i] for i in nucleus) for token_id in nucleus}


def test_next_logits_are_the_last_position_of_the_whole_sequence() -> None:
    ids = [1, 2, 3, 4]
    with torch.inference_mode():
        expected = decoder(torch.tensor([ids]))[0, -1].numpy()
    assert np.array_equal(next_logits(decoder, ids), expected)
    assert next_logits(decoder, ids).dtype == np.float32


def test_greedy_is_the_chain_of_argmaxes() -> None:
    expected = list(PROMPT)
    for _ in range(12):
        expected.append(int(next_logits(decoder, expected).argmax()))
    assert generate(decoder, PROMPT, max_tokens=12) == expected[3:]
    assert generate(decoder, PROMPT, max_tokens=0) == []
    assert len(set(expected[3:])) > 2  # a chain stuck on one token would show nothing


def test_generation_turns_dropout_off() -> None:
    dropping = make_decoder(replace(CONFIG, dropout=0.5, attention_dropout=0.5)).train()
    assert generate(dropping, PROMPT, max_tokens=12) == generate(decoder, PROMPT, max_tokens=12)


def test_it_stops_after_an_ending_token_which_it_returns() -> None:
    free = generate(decoder, PROMPT, max_tokens=12)
    ending = free[5]
    ended = generate(decoder, PROMPT, max_tokens=12, ending_ids=[ending, 299])
    assert ended == free[: free.index(ending) + 1]
    unused = {max(set(range(300)) - set(free))}
    assert generate(decoder, PROMPT, max_tokens=12, ending_ids=unused) == free
    # An ending token in the prompt ends nothing.
    assert generate(decoder, [*PROMPT, ending], max_tokens=2, ending_ids=[ending])


def test_the_stream_of_random_numbers_is_named_by_seed_and_sample_index() -> None:
    def sampled(seed: int, sample_index: int) -> list[int]:
        return generate(
            decoder, PROMPT, max_tokens=12, temperature=1.0, seed=seed, sample_index=sample_index
        )

    names = list(itertools.product((0, 1, 2**63), (0, 1)))
    streams = [sampled(*name) for name in names]
    assert streams == [sampled(*name) for name in names]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_sampling_follows_its_uniform_numbers_through_the_distribution() -> None:
    """The i-th token is where the i-th number of Philox(seed, sample_index) falls, by id."""
    numbers = np.random.Generator(np.random.Philox(key=np.array([7, 2], dtype=np.uint64)))
    ids = list(PROMPT)
    for _ in range(10):
        kept = kept_probabilities(next_logits(decoder, ids), 0.9, 20, 0.95)
        uniform, cumulative = numbers.random(), 0.0
        for token_id in sorted(kept):
            cumulative += kept[token_id]
            if cumulative > uniform:
                break
        ids.append(token_id)
    sampled = generate(
        decoder,
        PROMPT,
        max_tokens=10,
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        seed=7,
        sample_index=2,
    )
    assert sampled == ids[3:]


@given(
    logits=st.lists(st.integers(-60, 60).map(lambda i: i / 8), min_size=1, max_size=9, unique=True),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.01, 0.3, 0.77, 0.95, 1.0]),
)
def test_draw_gives_every_token_its_share_of_the_unit_interval(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """A fine grid stands in for random numbers: shares are lengths, and need no statistics."""
    row = np.array(logits, dtype=np.float32)
    kept = kept_probabilities(row, temperature, top_k, top_p)
    n = 200
    drawn = [draw(row, temperature, top_k, top_p, uniform=(i + 0.5) / n) for i in range(n)]
    for token_id in range(len(row)):
        assert abs(drawn.count(token_id) / n - kept.get(token_id, 0.0)) <= 1.5 / n
    assert drawn == sorted(drawn)  # in order of ids


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_draw_stays_among_the_kept_tokens_at_the_ends_of_the_interval(uniform: float) -> None:
    row = np.array([0.0, 5.0, 1.0, 5.0], dtype=np.float32)
    assert draw(row, 1.0, 1, 1.0, uniform) == 1  # a tie goes to the lower id
    assert draw(row, 1.0, 2, 1.0, uniform) == (1 if uniform < 0.5 else 3)
    assert draw(row, 1.0, 0, 1e-9, uniform) == 1


def test_a_low_temperature_is_greedy_and_does_not_overflow() -> None:
    row = np.array([100.0, -80.0, 101.0], dtype=np.float32)
    assert all(draw(row, 1e-6, 0, 1.0, uniform) == 2 for uniform in (0.0, 0.999))
