"""The picture of a load test, from random requests."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import matplotlib.image
import pytest

from loadtest.report import WINDOWS, Request, draw, over_time, read, summary, throughput

TICK = 1 / 64  # seconds; sums of these are exact
seeds = pytest.mark.parametrize("seed", range(5))


def random_requests(random: Random, n: int = 60) -> list[Request]:
    """Each ends in a tick of its own; one in five fails."""
    ends = random.sample(range(64, 6400), n)
    requests = []
    for end in ends:
        took = random.randint(1, 60)
        request = Request((end - took) * TICK, random.choice((4, 8, 16)), 0.5 * TICK, took * TICK, TICK, took)
        failed = replace(request, sent=end * TICK, ttft=None, e2e=None, longest_gap=None, tokens=0)
        requests.append(failed if random.random() < 0.2 else request)
    return sorted(requests, key=lambda request: request.sent)


@seeds
def test_a_file_is_read_as_it_was_written(seed: int, tmp_path: Path) -> None:
    requests = random_requests(Random(seed))
    path = tmp_path / "requests.csv"
    columns = ("scenario", "sent", "ttft", "e2e", "tokens", "longest_gap", "users", "error")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for r in Random(seed).sample(requests, len(requests)):
            writer.writerow(("chat", 1e6 + r.sent, r.ttft, r.e2e, r.tokens or None, r.longest_gap, r.users, "a, b"))
    first = requests[0].sent
    assert read(path) == [replace(request, sent=request.sent - first) for request in requests]


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("scenario,sent\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no request"):
        read(path)


@seeds
def test_throughput_divides_tokens_by_the_ticks_that_led_to_an_end(seed: int) -> None:
    requests = random_requests(Random(seed))
    by_end = {round(request.ended / TICK): request for request in requests}
    ticks: dict[int, int] = defaultdict(int)
    tokens: dict[int, int] = defaultdict(int)
    following = None
    for tick in range(max(by_end), 0, -1):
        following = by_end.get(tick, following)
        assert following is not None
        ticks[following.users] += 1
        tokens[following.users] += by_end[tick].tokens if tick in by_end else 0
    assert throughput(requests) == pytest.approx({users: tokens[users] / (ticks[users] * TICK) for users in ticks})


def test_users_that_come_back_are_counted_for_the_time_in_which_they_were_there() -> None:
    """As in a spike: dividing by all of the time from the first to the last would be a third of the truth."""
    requests = [Request(float(second), 16 if 10 <= second < 20 else 4, 0.1, 1.0, 0.1, 50) for second in range(30)]
    assert throughput(requests) == pytest.approx({4: 50.0, 16: 50.0})


@seeds
def test_percentiles_are_of_their_window(seed: int) -> None:
    random = Random(seed)
    until = 30.0
    times = [random.uniform(0, until) for _ in range(200)] + [until]
    values = [random.expovariate(1) for _ in times]
    windows: dict[int, list[float]] = defaultdict(list)
    for time, value in zip(times, values, strict=True):
        windows[min(int(time / until * WINDOWS), WINDOWS - 1)].append(value)
    middles, found = over_time(times, values, until)
    assert list(middles) == pytest.approx([(i + 0.5) * until / WINDOWS for i in sorted(windows)])
    assert found[50] == pytest.approx([median(windows[i]) for i in sorted(windows)])
    assert all(p50 <= p90 <= p99 for p50, p90, p99 in zip(found[50], found[90], found[99], strict=True))


@pytest.mark.parametrize("kept", ["all", "failed", "one", "one failed"])
def test_a_picture_is_drawn_of_whatever_came(kept: str, tmp_path: Path) -> None:
    requests = random_requests(Random(0))
    if "failed" in kept:
        requests = [request for request in requests if request.e2e is None]
    if "one" in kept:
        requests = [replace(requests[0], sent=0.0)]
    draw(requests, tmp_path / "report.png")
    picture = matplotlib.image.imread(tmp_path / "report.png")
    assert picture.shape[:2] == (792, 1320)
    assert picture.std() > 0.01
    assert f"{len(requests)} requests" in summary(requests)
