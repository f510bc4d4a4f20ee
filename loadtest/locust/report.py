"""A picture of a load test: python -m loadtest.locust.report REQUESTS.csv REPORT.png [LIMITS]

Reads the lines that loadtest/locust/locustfile.py wrote,
one a request: latencies over time beside their limits (as --slo has
them), what was answered over time, and throughput by how many requests were on their way at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from loadtest.locust.request_log import (
    Floats,
    Level,
    Request,
    by_concurrency,
    latencies,
    on_their_way,
    read,
    token_times,
)
from loadtest.locust.slo import Limit, parse_slo

PERCENTILES = {50: "#1b4965", 90: "#4f93b8", 99: "#a9cfe3"}  # and their colours
ANSWERED, FAILED, ON_THEIR_WAY, LATENCY = "#2a9d8f", "#d1495b", "#e9ecef", "#e09f3e"
TITLES = {"ttft": "Time to first token", "itl": "Between tokens", "e2e": "Whole answer"}
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def over_time(
    times: Floats, values: Floats, edges: Floats
) -> tuple[Floats, dict[int, list[float]]]:
    """Percentiles of the values in each window between two edges that has any, and the middles of those windows."""
    window = np.clip(np.digitize(times, edges) - 1, 0, len(edges) - 2)
    filled = np.unique(window)
    found = {p: [float(np.percentile(values[window == i], p)) for i in filled] for p in PERCENTILES}
    return (edges[filled] + edges[filled + 1]) / 2, found


def windows(requests: list[Request]) -> Floats:
    """Edges of windows that hold some 100 requests each, if that makes 6 of them, and are 40 at most."""
    until = max(request.ended for request in requests) or 1.0
    return np.linspace(0, until, min(40, max(6, len(requests) // 100)) + 1)


def summary(requests: list[Request]) -> str:
    until = max(request.ended for request in requests)
    n_failed = sum(request.failed for request in requests)
    tokens = sum(request.tokens for request in requests)
    parts = [f"{len(requests):,} requests in {until:.0f} s, {n_failed:,} failed"]
    if until:
        parts.append(f"{tokens / until:,.0f} output tokens/s")
    if len(known := latencies(requests, "ttft")[1]):
        middle, high = np.percentile(known, (50, 99)) * 1e3
        parts.append(f"first token p50 {middle:,.0f} ms, p99 {high:,.0f} ms")
    return "   |   ".join(parts)


def draw(requests: list[Request], path: Path, limits: list[Limit]) -> None:
    mpl.use("Agg")
    edges = windows(requests)
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _draw_latency(axes, requests, "ttft", edges, limits),
        lambda axes: _draw_latency(axes, requests, "itl", edges, limits),
        lambda axes: _draw_latency(axes, requests, "e2e", edges, limits),
        lambda axes: _draw_tokens(axes, requests, edges),
        lambda axes: _draw_ends(axes, requests, edges),
        lambda axes: _draw_levels(axes, by_concurrency(requests)),
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(16, 8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
        for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
            panel(axes)
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        figure.suptitle(summary(requests), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=110)


def _draw_latency(
    axes: Axes, requests: list[Request], kind: str, edges: Floats, limits: list[Limit]
) -> None:
    times, values = latencies(requests, kind)
    values = values * 1e3
    axes.set_title(TITLES[kind], fontweight="bold")
    axes.set(ylabel="milliseconds", xlim=(0, edges[-1]))
    if not len(values):
        return
    middles, found = over_time(times, values, edges)
    for percentile, line in reversed(found.items()):
        axes.fill_between(middles, line, color=PERCENTILES[percentile], alpha=0.25, linewidth=0)
        label = f"p{percentile} {np.percentile(values, percentile):,.0f} ms"
        axes.plot(
            middles,
            line,
            color=PERCENTILES[percentile],
            label=label,
            linewidth=1.8,
            marker="o",
            markersize=3,
        )
    top = max(found[99])
    for limit in limits:
        if limit.kind == kind:
            label = f"p{limit.percentile:g} may be {limit.most:,.0f} ms"
            is_near = limit.most < 2 * top  # one far above would flatten the lines
            axes.plot(
                *([0, edges[-1]], [limit.most] * 2) if is_near else ([], []),
                "--",
                color=FAILED,
                label=label,
            )
            top = max(top, limit.most if is_near else 0)
    axes.set_ylim(0, 1.3 * top)
    axes.legend(ncols=2, loc="upper right")
    axes.set_xlabel(f"seconds; about {len(values) / len(middles):,.0f} values in each window")


def _draw_behind(axes: Axes, requests: list[Request]) -> None:
    """How many requests are on their way, in grey behind everything else."""
    behind = axes.twinx()
    moments, counts = on_their_way(requests)
    behind.fill_between(moments, counts, step="post", color=ON_THEIR_WAY, linewidth=0)
    behind.set(ylabel="requests on their way (grey)", ylim=(0, 1.3 * counts.max()))
    behind.yaxis.set_major_locator(MaxNLocator(integer=True))
    behind.grid(visible=False)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_tokens(axes: Axes, requests: list[Request], edges: Floats) -> None:
    _draw_behind(axes, requests)
    times, tokens = token_times(requests)
    speed = np.histogram(times, edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(speed, edges, color=ANSWERED, linewidth=1.8, baseline=None)
    axes.set_title("Throughput", fontweight="bold")
    axes.set(
        xlabel="seconds",
        ylabel="output tokens/s",
        xlim=(0, edges[-1]),
        ylim=(0, 1.3 * max(1.0, *speed)),
    )


def _draw_ends(axes: Axes, requests: list[Request], edges: Floats) -> None:
    _draw_behind(axes, requests)
    top = 0.0
    for name, failed, colour in (("answered", False, ANSWERED), ("failed", True, FAILED)):
        ended = [request.ended for request in requests if request.failed is failed]
        if not ended:
            continue
        rate = np.histogram(ended, edges)[0] / np.diff(edges)
        axes.stairs(
            rate, edges, label=f"{name} {len(ended):,}", color=colour, linewidth=1.8, baseline=None
        )
        top = max(top, *rate)
    axes.set_title("Requests that ended", fontweight="bold")
    axes.set(xlabel="seconds", ylabel="requests/s", xlim=(0, edges[-1]), ylim=(0, 1.3 * top))
    axes.legend(ncols=2, loc="upper right")


def _draw_levels(axes: Axes, levels: list[Level]) -> None:
    axes.set_title("Throughput by concurrency", fontweight="bold")
    counts = [level.concurrency for level in levels]
    speeds = [level.tokens_per_second for level in levels]
    axes.plot(
        counts,
        speeds,
        color=ANSWERED,
        marker="o",
        markersize=7,
        linewidth=1.8,
        label="output tokens/s",
    )
    for count, speed in zip(counts, speeds, strict=True):
        axes.annotate(
            f"{speed:,.0f}",
            (count, speed),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=ANSWERED,
        )
    axes.set(
        xlabel="requests on their way",
        xlim=(0, 1.1 * max([1.0, *counts])),
        ylim=(0, 1.3 * max([1.0, *speeds])),
    )
    axes.set_ylabel("output tokens/s", color=ANSWERED)
    known = [
        (level.concurrency, level.ttft_p90 * 1e3) for level in levels if level.ttft_p90 is not None
    ]
    if known:
        beside = axes.twinx()
        beside.plot(
            *zip(*known, strict=True),
            color=LATENCY,
            marker="s",
            markersize=5,
            linewidth=1.8,
            linestyle=":",
        )
        beside.set_ylabel("first token p90, ms (dotted)", color=LATENCY)
        beside.set_ylim(0, 1.3 * max(value for _, value in known))
        beside.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        beside.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print(  # noqa: T201
            "usage: python -m loadtest.locust.report REQUESTS.csv REPORT.png [LIMITS]",
            file=sys.stderr,
        )
        return 2
    try:
        draw(read(Path(sys.argv[1])), Path(sys.argv[2]), parse_slo(" ".join(sys.argv[3:])))
    except (OSError, ValueError) as error:
        print(f"no picture: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
