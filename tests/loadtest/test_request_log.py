"""Figures of a load test's requests, against counts that go tick by tick."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from loadtest.locust.request_log import (
    MAX_LEVELS,
    Request,
    by_concurrency,
    latencies,
    open_requests,
    read,
)
from tests.load_requests import TICK, random_requests

seeds = pytest.mark.parametrize("seed", range(5))


@seeds
def test_a_file_is_read_as_it_was_written(seed: int, tmp_path: Path) -> None:
    requests = random_requests(Random(seed))
    path = tmp_path / "requests.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("scenario", "sent", "ended", "ttft", "e2e", "tokens", "gaps", "error"))
        for r in Random(seed).sample(requests, len(requests)):
            gaps = " ".join(map(str, r.gaps))
            times = (1e6 + r.sent, 1e6 + r.ended)
            writer.writerow(
                ("chat", *times, r.ttft, r.e2e, r.tokens, gaps, "a, b" if r.failed else "")
            )
    first = requests[0].sent
    assert read(path) == [
        replace(request, sent=request.sent - first, ended=request.ended - first)
        for request in requests
    ]


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("scenario,sent\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no request"):
        read(path)


@seeds
def test_throughput_is_of_the_ticks_in_which_so_many_were_open_requests(seed: int) -> None:
    requests = random_requests(Random(seed))
    n_ticks = round(max(request.ended for request in requests) / TICK)
    counts = [sum(r.sent <= i * TICK < r.ended for r in requests) for i in range(n_ticks + 1)]
    n_before = round(requests[0].sent / TICK)
    width = -(-max(counts) // MAX_LEVELS)
    ticks: dict[int, list[int]] = defaultdict(list)
    tokens: dict[int, float] = defaultdict(float)
    firsts: dict[int, list[float]] = defaultdict(list)
    for count in counts[n_before:-1]:
        ticks[-(-count // width)].append(count)
    for request in requests:
        for at in request.event_times:
            tokens[-(-counts[round(at / TICK)] // width)] += request.tokens / len(
                request.event_times
            )
        if not request.failed:
            assert request.ttft is not None
            firsts[-(-counts[round(request.sent / TICK)] // width)].append(request.ttft)
    long = [
        level
        for level in sorted(ticks)
        if level and len(ticks[level]) >= 0.02 * (n_ticks - n_before)
    ]
    assert len(long) > 2
    found = by_concurrency(requests)
    assert [level.concurrency for level in found] == pytest.approx(
        [np.mean(ticks[i]) for i in long]
    )
    wanted = [tokens[i] / (len(ticks[i]) * TICK) for i in long]
    assert [level.tokens_per_second for level in found] == pytest.approx(wanted)
    assert [level.ttft_p90 for level in found] == [
        pytest.approx(np.percentile(firsts[i], 90)) if firsts[i] else None for i in long
    ]


def test_a_spikes_quarter_counts_for_the_time_in_which_it_was_there() -> None:
    """4 at once, then 16, then 4 again: over all of the time from the first to the last, 4 would bring a third less."""
    requests = []
    for second in range(30):
        together = 16 if 10 <= second < 20 else 4
        requests += [
            Request(float(second), second + 1.0, 0.5, 1.0, (0.25,), 50, failed=False)
        ] * together
    found = by_concurrency(requests)
    assert [level.concurrency for level in found] == [4, 16]
    assert [level.tokens_per_second for level in found] == [200, 800]


@seeds
def test_all_that_were_sent_are_open_requests_until_they_end(seed: int) -> None:
    requests = random_requests(Random(seed))
    moments, counts = open_requests(requests)
    assert counts[-1] == 0
    lasted = float(np.diff(moments) @ counts[:-1])
    assert lasted == pytest.approx(sum(request.ended - request.sent for request in requests))


@seeds
def test_gaps_are_at_the_event_that_ends_them(seed: int) -> None:
    requests = random_requests(Random(seed))
    times, values = latencies(requests, "itl")
    wanted = []
    for request in requests:
        at = request.sent + (request.ttft or 0)
        for gap in () if request.failed else request.gaps:
            at += gap
            wanted.append((at, gap))
    assert list(zip(times, values, strict=True)) == wanted


@seeds
def test_only_whole_answers_have_a_time_to_their_end(seed: int) -> None:
    """Those that were left early would loosen a limit on it."""
    requests = random_requests(Random(seed))
    sent, values = latencies(requests, "e2e")
    whole = [r for r in requests if not r.failed and r.e2e is not None]
    assert len(whole) < sum(not r.failed for r in requests)
    assert list(zip(sent, values, strict=True)) == [(r.sent, r.ended - r.sent) for r in whole]
