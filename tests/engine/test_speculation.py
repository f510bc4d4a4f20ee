"""Speculation against one step a token, and against the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sampling.sampler import sample, verify
from kvasir.server.engine.sampling.speculation import NGRAM_SIZES, Speculation, best_draft_length
from kvasir.server.engine.sequence import Sequence
from tests.kit.engine_driver import make_sequence

VOCAB = 12
PROMPT = [1, 2, 3, 1, 2]

Model = Callable[[list[int]], NDArray[np.float32]]


def random_model(seed: int) -> Model:
    """Logits [vocab] that depend on the last two tokens."""
    table = (
        np.random.default_rng(seed).normal(scale=2.0, size=(VOCAB, VOCAB, VOCAB)).astype(np.float32)
    )

    def logits(token_ids: list[int]) -> NDArray[np.float32]:
        return np.asarray(table[token_ids[-2], token_ids[-1]])

    return logits


def verify_with(model: Model, sequence: Sequence, draft: list[int]) -> list[int | None]:
    """Verify with the logits after the sequence's tokens and after each of the draft."""
    ids = sequence.token_ids
    return verify(
        np.stack([model(ids + draft[:i]) for i in range(len(draft) + 1)]), sequence, draft
    )


def has_ended(sequence: Sequence) -> bool:
    ids = sequence.output_ids
    return len(ids) >= sequence.params.max_tokens or (bool(ids) and ids[-1] in sequence.ending_ids)


def step_by_step(model: Model, sequence: Sequence) -> list[int]:
    while not has_ended(sequence):
        token = sample(model(sequence.token_ids), sequence)
        assert token is not None
        sequence.output_ids.append(token)
    return sequence.output_ids


def speculate(model: Model, sequence: Sequence, propose: Callable[[], list[int]]) -> list[int]:
    while not has_ended(sequence):
        draft, before = propose(), list(sequence.output_ids)
        tokens = verify_with(model, sequence, draft)
        assert sequence.output_ids == before, "appending is the caller's"
        assert 1 <= len(tokens) <= len(draft) + 1
        assert tokens[: len(tokens) - 1] == draft[: len(tokens) - 1]
        for token in tokens:
            assert not has_ended(sequence), "tokens after the last"
            assert token is not None
            sequence.output_ids.append(token)
    return sequence.output_ids


def propose_by_definition(token_ids: list[int], n_draft: int) -> list[int]:
    for size in sorted(NGRAM_SIZES, reverse=True):
        for start in reversed(range(len(token_ids) - size)):
            if token_ids[start : start + size] == token_ids[-size:]:
                text = list(token_ids)
                for i in range(n_draft):
                    text.append(text[start + size + i])
                return text[len(token_ids) :]
    return []


@settings(max_examples=100)
@given(
    token_ids=st.integers(1, 6).flatmap(
        lambda n: st.lists(st.integers(0, n), min_size=1, max_size=60)
    ),
    lengths=st.lists(st.integers(1, 60), max_size=6),
    n_draft=st.integers(0, 9),
)
def test_proposals_equal_a_search_of_the_whole_text(
    token_ids: list[int], lengths: list[int], n_draft: int
) -> None:
    """Would catch an index that misses tokens between calls, or finds the n-gram itself."""
    lookup = Speculation()
    for n in [*sorted(lengths), len(token_ids), len(token_ids)]:
        if n <= len(token_ids):
            assert lookup.propose(token_ids[:n], n_draft) == propose_by_definition(
                token_ids[:n], n_draft
            )


sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 25),
    min_tokens=st.sampled_from([0, 0, 4]),
    temperature=st.sampled_from([0.0, 0.3, 0.9, 1.5]),
    top_k=st.sampled_from([0, 0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    typical_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=2),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=120)
@given(
    params=sampling, model_seed=st.integers(0, 50), hit_rate=st.sampled_from([0.0, 0.6, 0.9, 1.0])
)
def test_tokens_and_draws_equal_those_of_one_step_a_token(
    params: SamplingParams, model_seed: int, hit_rate: float
) -> None:
    """Drafts here look ahead with a few errors, and run past the end.

    Would catch penalties that miss an accepted token or keep a rejected one, a draw that is lost or
    made twice, and tokens after an ending.
    """
    model = random_model(model_seed)
    plain, speculating = make_sequence(0, PROMPT, params), make_sequence(0, PROMPT, params)
    expected = step_by_step(model, plain)
    errors = np.random.default_rng(model_seed)

    def look_ahead() -> list[int]:
        ahead = [*expected, *range(8)][len(speculating.output_ids) :][: int(errors.integers(9))]
        return [t if errors.random() < hit_rate else int(errors.integers(VOCAB)) for t in ahead]

    assert speculate(model, speculating, look_ahead) == expected
    assert speculating.generator.random() == plain.generator.random()


def likes(*wanted: int) -> NDArray[np.float32]:
    """Logits [n, vocab] whose likeliest tokens are these."""
    return np.eye(VOCAB, dtype=np.float32)[list(wanted)]


def greedy(max_tokens: int = 9, **params: Any) -> Sequence:
    params |= {"max_tokens": max_tokens, "temperature": 0.0}
    return make_sequence(0, PROMPT, SamplingParams(**params))


@pytest.mark.parametrize(
    ("draft", "tokens"),
    [([], [4]), ([5], [4]), ([4, 5, 7], [4, 5, 6]), ([4, 5, 6], [4, 5, 6, 7]), ([6, 5, 4], [4])],
)
def test_a_draft_is_kept_up_to_its_first_error_and_a_token_follows(
    draft: list[int], tokens: list[int]
) -> None:
    assert verify(likes(4, 5, 6, 7)[: len(draft) + 1], greedy(), draft) == tokens


def test_a_row_without_a_token_to_choose_comes_last() -> None:
    logits = likes(4, 5, 6)
    logits[1] = np.nan
    assert verify(logits, greedy(), [4, 5]) == [4, None]


def test_drafts_are_as_long_as_they_are_worth() -> None:
    """They are longer at high hit rates, and none at low ones or beside many sequences."""
    rates = np.linspace(0, 1, 101).tolist()
    for n_running in range(1, 5):
        lengths = [best_draft_length(rate, n_running, room=99) for rate in rates]
        assert lengths == sorted(lengths)
        assert lengths[0] == 0
        assert lengths[-1] == 8
    for rate in rates:
        worth = [best_draft_length(rate, n_running, room=99) > 0 for n_running in range(1, 9)]
        assert worth == sorted(worth, reverse=True)
        assert not any(worth[4:])


@pytest.mark.parametrize("n_running", [1, 4])
def test_drafts_keep_to_what_is_reserved(n_running: int) -> None:
    """Would catch keys and values written past the row's reservation."""
    for max_tokens in range(1, 12):
        sequence = make_sequence(0, [1, 2, 3] * 4, SamplingParams(max_tokens=max_tokens))
        while len(sequence.output_ids) < max_tokens:
            sequence.speculation = Speculation()
            draft = sequence.draft(n_running)
            room = max_tokens - len(sequence.output_ids) - 1
            assert len(draft) <= room
            assert len(sequence.token_ids) + len(draft) < len(sequence.prompt_ids) + max_tokens
            if n_running == 1 and room:
                assert draft == [
                    sequence.token_ids[i % 3]
                    for i in range(len(sequence.token_ids), len(sequence.token_ids) + min(room, 8))
                ]
            sequence.output_ids.append(sequence.token_ids[len(sequence.token_ids) % 3])


def replay(sequence: Sequence, text: list[int], n_running: int) -> list[tuple[int, int]]:
    """(length, hits) of every draft while the sequence is continued by `text`."""
    drafts, speculation = [], sequence.speculation
    assert speculation is not None
    end = len(sequence.token_ids) + len(text)
    text = sequence.token_ids + text
    while len(sequence.token_ids) < end:
        draft = sequence.draft(n_running)
        tokens: list[int | None] = []
        for guess, token in zip((*draft, None), text[len(sequence.token_ids) :], strict=False):
            tokens.append(token)
            sequence.output_ids.append(token)
            if token != guess:
                break
        if draft:
            speculation.record(len(sequence.output_ids), draft, tokens)
            drafts.append((len(draft), sum(t == g for t, g in zip(tokens, draft, strict=False))))
    return drafts


@pytest.mark.parametrize(("n_running", "most"), [(1, 60), (2, 15), (4, 5)])
def test_drafts_that_fail_pause_and_come_back_when_they_succeed(n_running: int, most: int) -> None:
    """most: wrong drafts in a thousand tokens, a third of which allow one."""
    sequence = make_sequence(0, [1, 2], SamplingParams(max_tokens=9999))
    sequence.speculation = Speculation()
    wrong = replay(sequence, [token for i in range(333) for token in (10 + i, 1, 2)], n_running)
    assert wrong[0] == (8, 0)
    assert not any(hits for _, hits in wrong)
    assert len(wrong) <= most
    right = replay(sequence, [5, 6, 7] * 400, n_running)
    assert right[-10:-1] == [(8, 8)] * 9
    assert len(right) < 160  # 134 drafts of eight would do
