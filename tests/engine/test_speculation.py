"""Speculation against one step a token, and against the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sampling.sampler import sample, verify
from kvasir.server.engine.sampling.speculation import (
    _EMPTY_RUN,
    MAX_DRAFTED,
    Speculation,
    draft_lengths,
)
from kvasir.server.engine.sequence import Sequence, draft
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


def verify_with(model: Model, sequence: Sequence, draft: list[int]) -> Iterator[int | None]:
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
        tokens: list[int] = []
        for token in verify_with(model, sequence, draft):
            assert sequence.output_ids == before + tokens, "appending is the caller's"
            assert token is not None
            tokens.append(token)
            sequence.output_ids.append(token)
            if has_ended(sequence):
                break
        assert 1 <= len(tokens) <= len(draft) + 1
        assert tokens[: len(tokens) - 1] == draft[: len(tokens) - 1]
    return sequence.output_ids


class Teller:
    """A text by definition; own: the sequence's, which grows."""

    def __init__(self, token_ids: list[int], *, own: bool) -> None:
        self.token_ids, self.own = token_ids, own
        self.place: int | None = None if own or not token_ids else 0
        self.hit_rate = 0.0 if self.place is None else 0.5
        self.error = 0

    def add(self, sequence: list[int]) -> bool:
        """Note the last token of a sequence."""
        is_right = self.place is not None and self.token_ids[self.place] == sequence[-1]
        if self.place is not None:
            self.hit_rate += 0.25 * (is_right - self.hit_rate)
            self.error, self.place = self.place, self.place + 1
        known = sequence if self.own else self.token_ids
        if not is_right or self.place == len(known):
            self.place = self.find(known, sequence)
        return is_right

    def find(self, known: list[int], sequence: list[int]) -> int | None:
        for size in (3, 2):
            tail = sequence[-size:]
            places = [i for i in range(size, len(known)) if known[i - size : i] == tail]
            if len(tail) == size and places:
                later = [i for i in places if i > self.error and not self.own]
                return [*later, places[-1]][0]
        return None

    def draft(self, n_tokens: int) -> list[int]:
        assert self.place is not None
        text = list(self.token_ids)
        for i in range(n_tokens):  # one's own text is repeated from its end on
            if self.own and self.place + i == len(text):
                text.append(text[self.place + i - (len(self.token_ids) - self.place)])
        return text[self.place :][:n_tokens]


tokens = st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, n), max_size=40))


@settings(max_examples=150)
@given(given_ids=tokens, output=tokens, changed=tokens, n_draft=st.integers(0, 9), data=st.data())
def test_texts_tell_what_they_tell_by_definition(
    given_ids: list[int], output: list[int], changed: list[int], n_draft: int, data: st.DataObject
) -> None:
    """The prediction is other tokens, with parts of the output between them."""
    prediction: list[int] = []
    for token in changed[:6]:
        start = data.draw(st.integers(0, len(output)))
        prediction += [token, *output[start : start + data.draw(st.integers(0, 9))]]
    speculation = Speculation(given_ids, prediction)
    sequence = list(given_ids)
    own, predicted = Teller(sequence, own=True), Teller(prediction, own=False)
    for token in output:
        sequence.append(token)
        own.add(sequence)
        assert speculation.add(token) == predicted.add(sequence)
        telling = [teller for teller in (predicted, own) if teller.place is not None]
        best = max(telling, key=lambda teller: teller.hit_rate, default=None)
        assert speculation.draft(n_draft) == (best.draft(n_draft) if best else [])
        assert speculation.hit_rate == (best.hit_rate if best else 0.0)


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


def test_a_row_without_a_token_to_choose_comes_last() -> None:
    logits = likes(4, 5, 6)
    logits[1] = np.nan
    assert list(verify(logits, greedy(), [4, 5])) == [4, None]


@pytest.mark.parametrize("in_one_run", [False, True])
def test_drafts_are_as_long_as_they_are_worth(in_one_run: bool) -> None:
    """They are longer at high hit rates, and none at low ones."""
    rates = np.linspace(0, 1, 101).tolist()
    lengths = [draft_lengths([rate], [99], in_one_run=in_one_run)[0] for rate in rates]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 8)
    for rate in rates:
        all_alike = draft_lengths([rate] * 16, [99] * 16, in_one_run=in_one_run)
        assert sum(all_alike) <= (MAX_DRAFTED if in_one_run else 0)
        assert max(all_alike) <= lengths[rates.index(rate)]


def speed(rates: list[float], lengths: Collection[int]) -> float:
    """Expected tokens by the time of a run, in times of one token."""
    expected = sum(
        sum(rate**i for i in range(length + 1)) for rate, length in zip(rates, lengths, strict=True)
    )
    return expected / (_EMPTY_RUN + len(rates) + sum(lengths))


@settings(max_examples=60)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.9, 0.97, 1.0]), min_size=1, max_size=3),
    data=st.data(),
)
def test_drafts_in_one_run_yield_most_tokens_per_second(
    rates: list[float], data: st.DataObject
) -> None:
    """Would catch a row that drafts where others lose more by it."""
    rooms = [data.draw(st.integers(0, 4)) for _ in rates]
    lengths = draft_lengths(rates, rooms, in_one_run=True)
    assert all(0 <= length <= room for length, room in zip(lengths, rooms, strict=True))
    plain = speed(rates, [0] * len(rates))
    assert speed(rates, lengths) >= plain
    if all(rate > plain for rate in rates):
        every = product(*(range(room + 1) for room in rooms))
        assert math.isclose(speed(rates, lengths), max(speed(rates, some) for some in every))
    else:
        assert sum(lengths) <= 0.25 * (_EMPTY_RUN + len(rates))


@pytest.mark.parametrize("n_running", [1, 4])
@pytest.mark.parametrize("in_one_run", [False, True])
def test_drafts_keep_to_what_is_reserved(n_running: int, in_one_run: bool) -> None:
    """Would catch keys and values written past the row's reservation."""
    for max_tokens in range(1, 22):
        sequence = repeating_sequence(max_tokens)
        others = [repeating_sequence(99) for _ in range(n_running - 1)]
        for i in range(max_tokens - 1):
            room = max_tokens - i - 2
            for one in (sequence, *others):
                extend(one, i % 3 + 1)
            drafts = draft([sequence, *others], in_one_run=in_one_run)
            assert len(drafts[0]) <= room
            assert drafts[0] == [(i + n + 1) % 3 + 1 for n in range(len(drafts[0]))]
            if i > 11 and n_running == 1:
                assert len(drafts[0]) == min(room, 8)


def repeating_sequence(max_tokens: int) -> Sequence:
    sequence = make_sequence(0, [1, 2, 3] * 4, SamplingParams(max_tokens=max_tokens))
    sequence.speculation = Speculation(sequence.prompt_ids)
    return sequence


def extend(sequence: Sequence, token: int) -> None:
    assert sequence.speculation is not None
    sequence.output_ids.append(token)
    sequence.speculation.add(token)


def replay(
    text: list[int], n_running: int = 1, prediction: list[int] | None = None
) -> tuple[list[int], list[int]]:
    """The lengths of all drafts while a sequence is continued by `text`, and their hits.

    Other sequences, with no drafts, share its run.
    """
    given_ids = [1, 2]
    sequence = make_sequence(0, given_ids, SamplingParams(max_tokens=len(text)))
    sequence.speculation = Speculation(given_ids, prediction or [])
    others = [make_sequence(0, [1], SamplingParams(max_tokens=99)) for _ in range(n_running - 1)]
    lengths, hits = [], []
    extend(sequence, text[0])
    while (n_done := len(sequence.output_ids)) < len(text):
        drafted = draft([sequence, *others], in_one_run=True)[0]
        n_right = 0
        while n_right < len(drafted) and drafted[n_right] == text[n_done + n_right]:
            n_right += 1
        for token in text[n_done : n_done + n_right + 1]:
            extend(sequence, token)
        lengths.append(len(drafted))
        hits.append(n_right)
    return lengths, hits


def time_of(lengths: list[int]) -> float:
    """The time of a lone sequence's runs, in times of a run of one token."""
    return sum((_EMPTY_RUN + 1 + length) / (_EMPTY_RUN + 1) for length in lengths)


@pytest.mark.parametrize("n_running", [1, 4, 16])
def test_a_text_that_never_repeats_itself_never_drafts(n_running: int) -> None:
    """A third of its places look like earlier ones."""
    lengths, _ = replay([t for i in range(333) for t in (10 + i, 1, 2)], n_running)
    assert not any(lengths)


@pytest.mark.parametrize("size", [4, 12, 40, 1000])
def test_random_text_loses_next_to_nothing(size: int) -> None:
    """Of 12 tokens almost every three were there before, and one guess in twelve is right."""
    text = np.random.default_rng(size).integers(size, size=4000).tolist()
    assert time_of(replay(text)[0]) <= 1.02 * len(text)


def test_a_wrong_prediction_costs_less_than_a_token() -> None:
    text, wrong = [10 + i for i in range(40)], [1000 + i for i in range(40)]
    looks_right = [t for i in range(40) for t in (10 + i, 11 + i, 1000 + i)]
    for prediction in (wrong, looks_right[2:]):
        assert time_of(replay(text, prediction=prediction)[0]) < len(text) + 1


@pytest.mark.parametrize(("n_running", "most"), [(1, 60), (2, 160), (16, 160)])
def test_a_text_that_begins_to_repeat_itself_drafts_at_once(n_running: int, most: int) -> None:
    """Beside sequences without drafts they are short."""
    lengths, hits = replay([*range(10, 110), *[5, 6, 7] * 100], n_running)
    assert lengths == hits
    assert len(lengths) - 100 <= most


@pytest.mark.parametrize("stray", [[], [500], [500, 501, 502]])
def test_a_prediction_is_found_again_after_a_change(stray: list[int]) -> None:
    """Of 200 tokens some are missing, some are others, some new."""
    prediction = [10 + i for i in range(200)]
    text = [*prediction[:80], *stray, *prediction[82:]]
    lengths, hits = replay(text, prediction=prediction)
    assert len(lengths) < 45
    assert sum(lengths) - sum(hits) <= 16
