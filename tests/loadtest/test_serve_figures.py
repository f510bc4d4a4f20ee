"""Percentiles, throughput, goodput and ratios against slow and obvious computations."""

from __future__ import annotations

import random
from itertools import chain
from statistics import median

import pytest

from loadtest.load import Workload
from loadtest.serve_figures import (
    LATENCIES,
    PERCENTILES,
    Measured,
    ServeFigures,
    figures,
    parse_limits,
    ratios,
)
from loadtest.sse_client import StreamedCompletion

WORKLOAD = Workload(4, 10, 8)


def answer(
    rng: random.Random, start: float = 0.0, *, n_tokens: int = 8, n_events: int = 8
) -> StreamedCompletion:
    sent = start + rng.random()
    times = sorted(sent + rng.random() * 3 for _ in range(n_events))
    usage = {"prompt_tokens": 10, "completion_tokens": n_tokens}
    return StreamedCompletion(sent=sent, event_times=times, ended=times[-1] + rng.random() / 10, usage=usage)


def percentile(values: list[float], p: float) -> float:
    """Between the two ranks that are nearest, in proportion."""
    ordered = sorted(values)
    place = p / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("seed", range(5))
def test_figures_against_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    waves = [
        [answer(rng, 10.0 * i, n_events=rng.randint(1, 9)) for _ in range(rng.randint(1, 9))]
        for i in range(3)
    ]
    found = figures(waves, {})
    answers = list(chain(*waves))
    expected = {
        "ttft": [a.event_times[0] - a.sent for a in answers],
        "itl": [
            a.event_times[i] - a.event_times[i - 1]
            for a in answers
            for i in range(1, len(a.event_times))
        ],
        "tpot": [(a.ended - a.event_times[0]) / 7 for a in answers if len(a.event_times) > 1],
        "e2e": [a.ended - a.sent for a in answers],
    }
    for name, values in expected.items():
        for p in PERCENTILES:
            assert found[f"{name}_ms_p{p}"] == pytest.approx(1000 * percentile(values, p))
    seconds = sum(max(a.ended for a in wave) - min(a.sent for a in wave) for wave in waves)
    assert found["output_tokens_per_second"] == pytest.approx(8 * len(answers) / seconds)
    assert found["requests_per_second"] == pytest.approx(len(answers) / seconds)
    assert "goodput" not in found


@pytest.mark.parametrize(
    "text", ["ttft:900", "itl:700", "tpot:250 e2e:2500", "ttft:900,itl:900,tpot:400,e2e:2900"]
)
def test_goodput_counts_requests_that_keep_every_limit(text: str) -> None:
    rng = random.Random(text)
    answers = [answer(rng) for _ in range(200)]
    n_good = 0
    for one in answers:
        keeps = True
        for limit in text.replace(",", " ").split():
            name, most = limit.split(":")
            longest = {"ttft": one.ttft, "itl": max(one.gaps), "tpot": one.tpot, "e2e": one.e2e}[
                name
            ]
            assert longest is not None
            keeps = keeps and longest * 1000 <= float(most)
        n_good += keeps
    assert 0 < n_good < 200
    found = figures([answers], parse_limits(text))
    assert found["goodput"] / found["requests_per_second"] == pytest.approx(n_good / 200)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "latency:5", "ttft:-1", "ttft:nan"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(
        ValueError, match="a goodput limit is one of ttft, itl, tpot, e2e with milliseconds"
    ):
        parse_limits(text)


def test_failed_requests_count_nowhere_but_are_told() -> None:
    rng = random.Random(0)
    fine = [answer(rng) for _ in range(4)]
    failed = [StreamedCompletion(sent=-100.0, event_times=[1.0], error="HTTP 429: full"), StreamedCompletion(error="other")]
    assert figures([[failed[0], *fine], [failed[1]]], {}) == figures([fine], {})
    measured = Measured(WORKLOAD, {}, [[[failed[0], *fine], [failed[1]]]])
    assert measured.errors == ["HTTP 429: full", "other"]
    assert measured.notes == ["2 of 6 requests failed, the first: HTTP 429: full"]
    assert figures([failed], {}) == {}


def test_a_single_token_has_neither_gap_nor_time_per_token() -> None:
    found = figures([[answer(random.Random(0), n_tokens=1, n_events=1)]], {"tpot": 1.0, "itl": 1.0})
    assert {key.partition("_")[0] for key in found if "_ms_" in key} == {"ttft", "e2e"}
    assert found["goodput"] == found["requests_per_second"]


def test_what_comes_in_one_read_has_no_pace() -> None:
    """It was shown as 0 ms between tokens, and kept any limit on that."""
    rng = random.Random(0)
    whole, paired = answer(rng), answer(rng)
    whole.event_times = [whole.event_times[-1]] * 8
    paired.event_times = sorted([*paired.event_times[:4]] * 2)
    found = figures([[whole]], {"itl": 5000.0})
    assert {key.partition("_")[0] for key in found if "_ms_" in key} == {"ttft", "e2e"}
    assert found["goodput"] == figures([[whole]], {"tpot": 5000.0})["goodput"] == 0
    assert len(paired.gaps) == 3
    assert min(paired.gaps) > 0
    assert Measured(WORKLOAD, {}, [[[whole, paired, answer(rng)]]]).notes == [
        "46% of events came in one read with the one before, and make no gap"
    ]


def test_what_the_reader_has_to_know() -> None:
    rng = random.Random(0)
    odd = [answer(rng, n_tokens=8, n_events=4), answer(rng, n_tokens=6)]
    uncounted = answer(rng)
    uncounted.usage = None
    assert Measured(WORKLOAD, {}, [[[answer(rng), answer(rng)]]]).notes == []
    assert Measured(WORKLOAD, {}, [[[*odd, uncounted]]]).notes == [
        "the server sends no usage, so events are counted as tokens",
        "not what was asked for: 10 tokens in, 6 out",
        "an event holds 1.10 tokens, so ITL is not the time of a token",
    ]


def test_rows_show_medians_over_rounds_and_the_first_server_relative_to_the_second() -> None:
    rng = random.Random(0)
    rounds = {letter: [[[answer(rng) for _ in range(5)]] for _ in range(3)] for letter in "AB"}
    row = {letter: Measured(WORKLOAD, {"ttft": 600.0}, waves) for letter, waves in rounds.items()}
    found = ServeFigures({"A": "http://a", "B": "http://b"}, {"4x10/8": row}).as_json()[
        "workloads"
    ]["4x10/8"]
    keys = {f"{name}_ms_p{p}" for name in LATENCIES for p in PERCENTILES}
    keys |= {"output_tokens_per_second", "requests_per_second", "goodput"}
    assert found["A/B"].keys() == keys
    for key in keys:
        medians = [
            median(figures(waves, {"ttft": 600.0})[key] for waves in rounds[letter])
            for letter in "AB"
        ]
        assert [found["servers"][letter]["median"][key] for letter in "AB"] == medians
        assert found["A/B"][key] == medians[0] / medians[1]
    assert ratios({"A": row["A"]}) == {}
