"""A picture of a load test: python -m loadtest.report REQUESTS.csv REPORT.png

Reads the lines that loadtest/locustfile.py wrote, one a request: latencies over time, and throughput by how many users
there were at the time.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WINDOWS = 40  # in which time is divided
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds; `sent` since the first. `ttft` and `e2e` are None of one that failed."""

    sent: float
    users: int
    ttft: float | None
    e2e: float | None
    longest_gap: float | None
    tokens: int

    @property
    def ended(self) -> float:
        return self.sent + (self.e2e or 0.0)


def read(path: Path) -> list[Request]:
    """Requests by when they were sent. Raises ValueError for a file that holds none."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no request")
    first = min(float(row["sent"]) for row in rows)
    requests = [
        Request(
            float(row["sent"]) - first,
            int(row["users"]),
            _seconds(row["ttft"]),
            _seconds(row["e2e"]),
            _seconds(row["longest_gap"]),
            int(row["tokens"] or 0),
        )
        for row in rows
    ]
    return sorted(requests, key=lambda request: request.sent)


def _seconds(text: str) -> float | None:
    return float(text) if text else None


def throughput(requests: list[Request]) -> dict[int, tuple[float, float]]:
    """By number of users: output tokens a second, and requests a second, over the time in which there were so many."""
    by_users: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        by_users[request.users].append(request)
    found = {}
    for users, ended in sorted(by_users.items()):
        seconds = max(request.ended for request in ended) - min(request.sent for request in ended)
        if seconds > 0:
            found[users] = (sum(r.tokens for r in ended) / seconds, sum(r.e2e is not None for r in ended) / seconds)
    return found


def draw(requests: list[Request], path: Path) -> None:
    mpl.use("Agg")
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    (ttft, gaps), (speed, errors) = figure.subplots(2, 2)
    _over_time(ttft, requests, "Time to first token", "ttft")
    _over_time(gaps, requests, "Longest gap between tokens, of each request", "longest_gap")
    found = throughput(requests)
    users = list(found)
    speed.plot(users, [tokens for tokens, _ in found.values()], marker="o")
    speed.set(title="Throughput by users", xlabel="users", ylabel="output tokens/s", ylim=(0, None))
    ends = np.array([request.ended for request in requests])
    failed = np.array([request.e2e is None for request in requests])
    edges = np.linspace(0, ends.max() or 1.0, WINDOWS + 1)
    for name, chosen, colour in (("answered", ~failed, "tab:blue"), ("failed", failed, "tab:red")):
        counts, _ = np.histogram(ends[chosen], edges)
        errors.step(edges[:-1], counts / np.diff(edges), where="post", label=name, color=colour)
    errors.set(title="Requests", xlabel="seconds", ylabel="requests/s", ylim=(0, None))
    errors.legend()
    for axes in (ttft, gaps, speed, errors):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{len(requests)} requests, {int(failed.sum())} failed")
    figure.savefig(path, dpi=110)


def _over_time(axes: Axes, requests: list[Request], title: str, name: str) -> None:
    known = [(request.sent, value * 1e3) for request in requests if (value := getattr(request, name)) is not None]
    if known:
        sent, values = map(np.array, zip(*known, strict=True))
        edges = np.linspace(0, sent.max() or 1.0, WINDOWS + 1)
        window = np.minimum(np.digitize(sent, edges) - 1, WINDOWS - 1)
        filled = [i for i in range(WINDOWS) if (window == i).any()]
        for percentile in PERCENTILES:
            points = [np.percentile(values[window == i], percentile) for i in filled]
            axes.plot(edges[filled], points, label=f"p{percentile}")
        axes.legend()
    axes.set(title=title, xlabel="seconds", ylabel="milliseconds", ylim=(0, None))


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m loadtest.report REQUESTS.csv REPORT.png", file=sys.stderr)  # noqa: T201
        return 2
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
