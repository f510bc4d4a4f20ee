"""Figures of a load test's requests, against counts tick by tick."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvasir.loadtest.locust.request_log import (
    MAX_LEVELS,
    Request,
    by_concurrency,
    latencies,
    open_requests,
    read,
)
from tests.load_requests import TICK, random_requests

seeds = pytest.mark.parametrize("seed", range(3))


@seeds
def test_a_file_is_read_as_it_was_written(seed: int, tmp_path: Path) -> None:
    requests = random_requests(Random(seed))
    path = tmp_path / "requests.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("scenario", "sent", "ended", "ttft", "e2e", "tokens", "gaps", "error"))
        for r in Random(seed).sample(requests, len(requests)):
            times = (1e6 + r.sent, 1e6 + r.ended, r.ttft, r.e2e)
            error = "a, b" if r.failed else ""
            writer.writerow(("chat", *times, r.tokens, " ".join(map(str, r.gaps)), error))
    first = requests[0].sent
    assert read(path) == [replace(r, sent=r.sent - first, ended=r.ended - first) for r in requests]


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("scenario,sent\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no request"):
        read(path)


@seeds
def test_throughput_is_grouped_by_the_open_requests_of_each_tick(seed: int) -> None:
    requests = random_requests(Random(seed))
    n_ticks = round(max(request.ended for request in requests) / TICK)
    counts = [sum(r.sent <= i * TICK < r.ended for r in requests) for i in range(n_ticks + 1)]
    n_before = round(requests[0].sent / TICK)
    width = -(-max(counts) // MAX_LEVELS)

    def level_at(time: float) -> int:
        return -(-counts[round(time / TICK)] // width)

    ticks: dict[int, list[int]] = defaultdict(list)
    tokens: dict[int, float] = defaultdict(float)
    firsts: dict[int, list[float]] = defaultdict(list)
    for count in counts[n_before:-1]:
        ticks[-(-count // width)].append(count)
    for request in requests:
        for at in request.event_times:
            tokens[level_at(at)] += request.tokens / len(request.event_times)
        if not request.failed:
            assert request.ttft is not None
            firsts[level_at(request.sent)].append(request.ttft)
    shortest = 0.02 * (n_ticks - n_before)
    long = [level for level in sorted(ticks) if level and len(ticks[level]) >= shortest]
    assert len(long) > 2
    found = by_concurrency(requests)
    assert [one.concurrency for one in found] == pytest.approx([np.mean(ticks[i]) for i in long])
    wanted = [tokens[i] / (len(ticks[i]) * TICK) for i in long]
    assert [one.tokens_per_second for one in found] == pytest.approx(wanted)
    p90s = [pytest.approx(np.percentile(firsts[i], 90)) if firsts[i] else None for i in long]
    assert [one.ttft_p90 for one in found] == p90s
    moments, open_counts = open_requests(requests)
    assert open_counts[-1] == 0
    lasted = float(np.diff(moments) @ open_counts[:-1])
    assert lasted == pytest.approx(sum(request.ended - request.sent for request in requests))


def test_a_level_counts_only_for_the_time_that_it_lasted() -> None:
    """4 at once, then 16, then 4: over the time from first to last, 4 would look a third slower."""
    requests = []
    for second in range(30):
        request = Request(float(second), second + 1.0, 0.5, 1.0, (0.25,), 50, failed=False)
        requests += [request] * (16 if 10 <= second < 20 else 4)
    found = by_concurrency(requests)
    assert [level.concurrency for level in found] == [4, 16]
    assert [level.tokens_per_second for level in found] == [200, 800]


@seeds
def test_gaps_are_at_the_event_that_ends_them_and_only_whole_answers_have_an_e2e(seed: int) -> None:
    """Cancelled ones would loosen a limit on it."""
    requests = random_requests(Random(seed))
    wanted = []
    for request in requests:
        at = request.sent + (request.ttft or 0)
        for gap in () if request.failed else request.gaps:
            at += gap
            wanted.append((at, gap))
    assert list(zip(*latencies(requests, "itl"), strict=True)) == wanted
    whole = [r for r in requests if not r.failed and r.e2e is not None]
    assert len(whole) < sum(not r.failed for r in requests)
    wanted = [(r.sent, r.ended - r.sent) for r in whole]
    assert list(zip(*latencies(requests, "e2e"), strict=True)) == wanted
