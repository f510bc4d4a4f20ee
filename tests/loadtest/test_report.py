"""The picture of a load test, of random requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import matplotlib.image
import numpy as np
import pytest

from kvasir.loadtest.locust.report import draw, over_time, summary, windows
from kvasir.loadtest.locust.request_log import Request
from kvasir.loadtest.locust.slo import parse_slo
from tests.load_requests import random_requests


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
    edges = windows([Request(float(i), i + 2.0, 0.1, 2.0, (), 1, failed=False) for i in range(n)])
    assert len(edges) == wanted + 1
    assert (edges[0], edges[-1]) == (0, n + 1)


LIMITS = "ttft:p99:1 itl:p50:1000000 e2e:p90:500 errors:1"


@pytest.mark.parametrize(
    ("kept", "limits"),
    [("all", LIMITS), ("failed", ""), ("answered", ""), ("one", LIMITS), ("one failed", LIMITS)],
)
def test_a_picture_is_drawn_of_any_requests(kept: str, limits: str, tmp_path: Path) -> None:
    requests = random_requests(Random(0))
    if kept in ("failed", "answered", "one failed"):
        requests = [request for request in requests if request.failed is ("failed" in kept)]
    if "one" in kept:
        requests = [replace(requests[0], sent=0.0)]
    draw(requests, tmp_path / "report.png", parse_slo(limits))
    picture = matplotlib.image.imread(tmp_path / "report.png")
    assert picture.shape[:2] == (880, 1760)
    assert picture.std() > 0.01
    n_failed = sum(request.failed for request in requests)
    assert f"{len(requests)} requests" in summary(requests)
    assert f"{n_failed} failed" in summary(requests)
