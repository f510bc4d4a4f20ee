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
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

WINDOWS = 30  # in which time is divided
PERCENTILES = {50: "#1b4965", 90: "#4f93b8", 99: "#a9cfe3"}  # and their colours
ANSWERED, FAILED, USERS = "#2a9d8f", "#d1495b", "#e9ecef"
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds; `sent` since the first. `ttft`, `e2e` and `longest_gap` are None of one that failed.

    users: how many there were when it ended.
    """

    sent: float
    users: int
    ttft: float | None
    e2e: float | None
    longest_gap: float | None
    tokens: int

    @property
    def ended(self) -> float:
        """One that failed ended at once, as far as is known."""
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


def throughput(requests: list[Request]) -> dict[int, float]:
    """Output tokens a second by number of users, of which there are as many between two ends as at the second."""
    seconds: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    before = 0.0
    for request in sorted(requests, key=lambda request: request.ended):
        seconds[request.users] += request.ended - before
        tokens[request.users] += request.tokens
        before = request.ended
    return {users: tokens[users] / seconds[users] for users in sorted(seconds) if seconds[users] > 0}


def over_time(
    times: list[float], values: list[float], until: float
) -> tuple[NDArray[np.float64], dict[int, list[float]]]:
    """Percentiles of the values in each window of 0..until that has any, and the middles of those windows."""
    edges = np.linspace(0, until or 1.0, WINDOWS + 1)
    window = np.clip(np.digitize(times, edges) - 1, 0, WINDOWS - 1)
    filled = np.unique(window)
    found = {p: [float(np.percentile(np.array(values)[window == i], p)) for i in filled] for p in PERCENTILES}
    return (edges[filled] + edges[filled + 1]) / 2, found


def draw(requests: list[Request], path: Path) -> None:
    mpl.use("Agg")
    until = max(request.ended for request in requests)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 7.2), layout="constrained")
        (ttft, gaps), (speed, answers) = figure.subplots(2, 2)
        _draw_latency(ttft, requests, "ttft", until)
        ttft.set(title="Time to first token")
        _draw_latency(gaps, requests, "longest_gap", until)
        gaps.set(title="Longest gap between tokens, of each request")
        _draw_throughput(speed, throughput(requests))
        _draw_answers(answers, requests, until)
        figure.suptitle(summary(requests), x=0.01, ha="left", fontsize=13)
        figure.savefig(path, dpi=110)


def summary(requests: list[Request]) -> str:
    until = max(request.ended for request in requests)
    n_failed = sum(request.e2e is None for request in requests)
    tokens = sum(request.tokens for request in requests)
    parts = [f"{len(requests):,} requests in {until:.0f} s, {n_failed:,} failed"]
    if until:
        parts.append(f"{tokens / until:,.0f} output tokens/s")
    if known := [request.ttft for request in requests if request.ttft is not None]:
        middle, high = np.percentile(known, (50, 99)) * 1e3
        parts.append(f"first token p50 {middle:.0f} ms, p99 {high:.0f} ms")
    return "   |   ".join(parts)


def _draw_latency(axes: Axes, requests: list[Request], name: str, until: float) -> None:
    known = [(request.sent, value * 1e3) for request in requests if (value := getattr(request, name)) is not None]
    if known:
        sent, values = map(list, zip(*known, strict=True))
        middles, found = over_time(sent, values, until)
        for percentile, line in reversed(found.items()):
            axes.fill_between(middles, line, color=PERCENTILES[percentile], alpha=0.25, linewidth=0)
            axes.plot(middles, line, color=PERCENTILES[percentile], label=f"p{percentile}", linewidth=1.8)
        axes.legend(ncols=len(PERCENTILES), loc="upper right")
    axes.set(xlabel="seconds", ylabel="milliseconds", xlim=(0, until or 1.0))
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])


def _draw_throughput(axes: Axes, found: dict[int, float]) -> None:
    axes.plot(list(found), list(found.values()), color=ANSWERED, marker="o", markersize=7, linewidth=1.8)
    for users, speed in found.items():
        axes.annotate(f"{speed:,.0f}", (users, speed), (0, 8), textcoords="offset points", ha="center")
    axes.set(title="Throughput by users", xlabel="users", ylabel="output tokens/s")
    axes.set(xlim=(0, 1.1 * max([1, *found])), ylim=(0, 1.2 * max([1.0, *found.values()])))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_answers(axes: Axes, requests: list[Request], until: float) -> None:
    """Answers and failures a second, and behind them how many users there were."""
    edges = np.linspace(0, until or 1.0, WINDOWS + 1)
    behind = axes.twinx()
    ends = sorted((request.ended, request.users) for request in requests)
    behind.fill_between([0.0, *(end for end, _ in ends)], [ends[0][1], *(n for _, n in ends)], step="pre", color=USERS)
    behind.set(ylabel="users", ylim=(0, 1.1 * max([1, *(n for _, n in ends)])))
    behind.grid(visible=False)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)
    for name, failed, colour in (("answered", False, ANSWERED), ("failed", True, FAILED)):
        counts, _ = np.histogram([r.ended for r in requests if (r.e2e is None) is failed], edges)
        axes.stairs(counts / np.diff(edges), edges, label=name, color=colour, linewidth=1.8, baseline=None)
    axes.set(title="Requests, and users (grey)", xlabel="seconds", ylabel="requests/s", xlim=(0, until or 1.0))
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.legend(ncols=2, loc="upper right")


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m loadtest.report REQUESTS.csv REPORT.png", file=sys.stderr)  # noqa: T201
        return 2
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
