"""Percentiles, throughput, goodput and ratios against slow and obvious computations."""

from __future__ import annotations

import random
from itertools import chain
from statistics import median

import pytest

from kvasir.loadtest.client import Answer
from kvasir.loadtest.load import Workload
from kvasir.loadtest.serve_figures import (
    LATENCIES,
    PERCENTILES,
    Measured,
    ServeFigures,
    figures,
    parse_limits,
    ratios,
)

WORKLOAD = Workload(4, 10, 8)


def answer(
    rng: random.Random, start: float = 0.0, *, n_tokens: int = 8, n_events: int = 8
) -> Answer:
    sent = start + rng.random()
    times = sorted(sent + rng.random() * 3 for _ in range(n_events))
    usage = {"prompt_tokens": 10, "completion_tokens": n_tokens}
    return Answer(sent, times, times[-1] + rng.random() / 10, usage)


def percentile(values: list[float], p: float) -> float:
    """Interpolate between the two nearest ranks."""
    ordered = sorted(values)
    place = p / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def latency_names(found: dict[str, float]) -> set[str]:
    return {name.partition("_")[0] for name in found if "_ms_" in name}


@pytest.mark.parametrize("seed", range(3))
def test_figures_against_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    waves = [
        [answer(rng, 10.0 * i, n_events=rng.randint(1, 9)) for _ in range(rng.randint(1, 9))]
        for i in range(3)
    ]
    found = figures(waves, {})
    answers = list(chain(*waves))
    events = [one.event_times for one in answers]
    expected = {
        "ttft": [one.event_times[0] - one.sent for one in answers],
        "itl": [times[i] - times[i - 1] for times in events for i in range(1, len(times))],
        "tpot": [(a.ended - a.event_times[0]) / 7 for a in answers if len(a.event_times) > 1],
        "e2e": [one.ended - one.sent for one in answers],
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
    limits = dict(limit.split(":") for limit in text.replace(",", " ").split())
    n_good = 0
    for one in answers:
        longest = {"ttft": one.ttft, "itl": max(one.gaps), "tpot": one.tpot or 0, "e2e": one.e2e}
        n_good += all(longest[name] * 1000 <= float(most) for name, most in limits.items())
    assert 0 < n_good < 200
    found = figures([answers], parse_limits(text))
    assert found["goodput"] / found["requests_per_second"] == pytest.approx(n_good / 200)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "latency:5", "ttft:-1", "ttft:nan"])
def test_an_invalid_limit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_limits(text)


def test_failed_requests_count_nowhere_but_are_noted() -> None:
    rng = random.Random(0)
    good = [answer(rng) for _ in range(4)]
    full = Answer(sent=-100.0, event_times=[1.0], error="HTTP 429: full")
    other = Answer(error="other")
    waves = [[full, *good], [other]]
    assert figures(waves, {}) == figures([good], {})
    measured = Measured(WORKLOAD, {}, [waves])
    assert measured.errors == ["HTTP 429: full", "other"]
    assert measured.notes == ["2 of 6 requests failed, the first: HTTP 429: full"]
    assert figures([[full, other]], {}) == {}


def test_a_single_token_has_neither_gap_nor_time_per_token() -> None:
    found = figures([[answer(random.Random(0), n_tokens=1, n_events=1)]], {"tpot": 1.0, "itl": 1.0})
    assert latency_names(found) == {"ttft", "e2e"}
    assert found["goodput"] == found["requests_per_second"]


def test_events_of_one_read_make_no_gap_and_keep_no_limit() -> None:
    rng = random.Random(0)
    whole, paired = answer(rng), answer(rng)
    whole.event_times = [whole.event_times[-1]] * 8
    paired.event_times = sorted([*paired.event_times[:4]] * 2)
    found = figures([[whole]], {"itl": 5000.0})
    assert latency_names(found) == {"ttft", "e2e"}
    assert found["goodput"] == figures([[whole]], {"tpot": 5000.0})["goodput"] == 0
    assert len(paired.gaps) == 3
    assert min(paired.gaps) > 0
    (note,) = Measured(WORKLOAD, {}, [[[whole, paired, answer(rng)]]]).notes
    assert note.startswith("46% of events came in one read")


def test_caveats_are_noted() -> None:
    rng = random.Random(0)
    odd = [answer(rng, n_tokens=8, n_events=4), answer(rng, n_tokens=6), answer(rng)]
    odd[-1].usage = None
    assert Measured(WORKLOAD, {}, [[[answer(rng), answer(rng)]]]).notes == []
    usage, length, mean = Measured(WORKLOAD, {}, [[odd]]).notes
    assert usage.startswith("the server sends no usage")
    assert length == "not what was asked for: 10 tokens in, 6 out"
    assert mean.startswith("an event holds 1.10 tokens")


def test_rows_have_medians_over_rounds_and_ratios_of_two_servers() -> None:
    rng = random.Random(0)
    limits = {"ttft": 600.0}
    rounds = {letter: [[[answer(rng) for _ in range(5)]] for _ in range(3)] for letter in "AB"}
    row = {letter: Measured(WORKLOAD, limits, waves) for letter, waves in rounds.items()}
    found = ServeFigures({}, {"4x10/8": row}).as_json()["workloads"]["4x10/8"]
    keys = {f"{name}_ms_p{p}" for name in LATENCIES for p in PERCENTILES}
    keys |= {"output_tokens_per_second", "requests_per_second", "goodput"}
    assert found["A/B"].keys() == keys
    for key in keys:
        medians = [median(figures(waves, limits)[key] for waves in rounds[x]) for x in "AB"]
        assert [found["servers"][x]["median"][key] for x in "AB"] == medians
        assert found["A/B"][key] == medians[0] / medians[1]
    medians_of = {letter: measured.as_json() for letter, measured in row.items()}
    assert ratios({"A": medians_of["A"]}) == {}
    assert ratios(medians_of | {"C": medians_of["A"]}).keys() == {"A/B", "A/C"}


def test_an_answer_in_one_piece_has_only_its_end() -> None:
    whole = Answer(1.0, [], 1.5, {"prompt_tokens": 7})
    found = figures([[whole, whole]], {})
    assert latency_names(found) == {"e2e"}
    assert found["requests_per_second"] == 4
    assert found["input_tokens_per_second"] == 28
    assert Measured(Workload.parse("2x8-64/vector"), {}, [[[whole]]]).notes == []
