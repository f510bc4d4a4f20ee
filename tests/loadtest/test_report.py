"""The picture of a load test, of random requests."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from statistics import median

import matplotlib.image
import numpy as np
import pytest

from kvasir.loadtest.client import Answer
from kvasir.loadtest.locust.report import draw, latencies, over_time, summary, token_times, windows
from kvasir.loadtest.locust.traffic import parse_slo


def random_answers(seed: int, n: int = 80) -> list[Answer]:
    """Draw answers: one in five fails, half of these without text; some others are cancelled."""
    random, answers = Random(seed), []
    for i in range(n):
        sent = 100.0 + random.uniform(0, 10)
        times = [*accumulate(random.uniform(0.01, 0.2) for _ in range(random.randint(1, 9)))]
        answer = Answer(sent, [sent + time for time in times], sent + times[-1] + 0.1)
        if i % 5 == 0:
            answer.fail("HTTP 429: full")
            answer.event_times = answer.event_times[: i % 2 * 9]
        elif i % 7 == 0:
            answer.ended = 0.0
        else:
            answer.usage = {"completion_tokens": 2 * len(times)}
        answers.append(answer)
    return answers


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_of_their_window(seed: int) -> None:
    random = Random(seed)
    until, n = 30.0, random.randint(4, 30)
    times = [random.uniform(0, until) for _ in range(200)] + [until]
    values = [random.expovariate(1) for _ in times]
    inside: dict[int, list[float]] = defaultdict(list)
    for time, value in zip(times, values, strict=True):
        inside[min(int(time / until * n), n - 1)].append(value)
    middles, found = over_time(np.array(times), np.array(values), np.linspace(0, until, n + 1))
    assert list(middles) == pytest.approx([(i + 0.5) * until / n for i in sorted(inside)])
    assert found[50] == pytest.approx([median(inside[i]) for i in sorted(inside)])
    assert all(np.diff([found[50], found[90], found[99]], axis=0).ravel() >= 0)


@pytest.mark.parametrize(("n", "wanted"), [(1, 6), (599, 6), (1250, 12), (9999, 40)])
def test_windows_are_fewer_where_they_would_hold_little(n: int, wanted: int) -> None:
    edges = windows([Answer(float(i), [i + 1.0], i + 2.0) for i in range(n)])
    assert len(edges) == wanted + 1
    assert (edges[0], edges[-1]) == (0, n + 1)


def test_gaps_are_at_the_event_that_ends_them_and_only_whole_answers_have_an_e2e() -> None:
    """Cancelled ones would loosen a limit on it, and failed ones count nowhere."""
    answers = random_answers(0)
    good = [answer for answer in answers if answer.error is None]
    wanted = [(b, 1e3 * (b - a)) for answer in good for a, b in pairwise(answer.event_times)]
    np.testing.assert_allclose(np.transpose(latencies(answers, "itl")), wanted)
    whole = [(answer.sent, 1e3 * answer.e2e) for answer in good if answer.ended]
    assert 0 < len(whole) < len(good)
    np.testing.assert_allclose(np.transpose(latencies(answers, "e2e")), whole)
    assert len(latencies(answers, "ttft")[0]) == len(good)
    times, tokens = token_times(answers)
    assert sorted(times) == sorted(time for answer in answers for time in answer.event_times)
    assert tokens.sum() == pytest.approx(sum(answer.n_tokens for answer in answers))


LIMITS = "ttft:p99:1 itl:p50:1000000 e2e:p90:500 errors:1"


@pytest.mark.parametrize(
    ("kept", "limits"),
    [("all", LIMITS), ("failed", ""), ("one answered", ""), ("one failed", LIMITS)],
)
def test_a_picture_is_drawn_of_any_requests(kept: str, limits: str, tmp_path: Path) -> None:
    answers = random_answers(0)
    if kept != "all":
        answers = [answer for answer in answers if (answer.error is not None) is ("failed" in kept)]
    if "one" in kept:
        answers = answers[:1]
    draw(answers, tmp_path / "report.png", parse_slo(limits))
    picture = matplotlib.image.imread(tmp_path / "report.png")
    assert picture.shape[:2] == (880, 1760)
    assert picture.std() > 0.01
    n_failed = sum(answer.error is not None for answer in answers)
    assert f"{len(answers)} requests" in summary(answers)
    assert f"{n_failed} failed" in summary(answers)
