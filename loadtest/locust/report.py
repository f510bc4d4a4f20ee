"""Draw a load test: python -m kvasir.loadtest.locust.report REQUESTS.csv REPORT.png [LIMITS].

Reads the lines that locustfile.py wrote, one a request. Draws latencies over time with their limits
(written as for --slo), requests and tokens over time, and throughput by open requests.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kvasir.loadtest.locust import request_log
from kvasir.loadtest.locust.request_log import Floats, Request
from kvasir.loadtest.locust.slo import Limit, parse_slo

PERCENTILES = {50: "#1b4965", 90: "#4f93b8", 99: "#a9cfe3"}  # and their colours
ANSWERED, FAILED, OPEN, LATENCY = "#2a9d8f", "#d1495b", "#e9ecef", "#e09f3e"
TITLES = {"ttft": "Time to first token", "itl": "Time between tokens", "e2e": "Whole answer"}
Panel = Callable[[Axes, list[Request], Floats], None]
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "legend.frameon": False,
    "lines.linewidth": 1.8, "patch.linewidth": 1.8,
}  # fmt: skip


def over_time(
    times: Floats, values: Floats, edges: Floats
) -> tuple[Floats, dict[int, list[float]]]:
    """Return the middles of the windows that hold values, and the percentiles in each."""
    window = np.clip(np.digitize(times, edges) - 1, 0, len(edges) - 2)
    filled = np.unique(window)
    found = {p: [float(np.percentile(values[window == i], p)) for i in filled] for p in PERCENTILES}
    return (edges[filled] + edges[filled + 1]) / 2, found


def windows(requests: list[Request]) -> Floats:
    """Return the edges of 6 to 40 equal windows, with about 100 requests in each if possible."""
    until = max(request.ended for request in requests) or 1.0
    return np.linspace(0, until, min(40, max(6, len(requests) // 100)) + 1)


def summary(requests: list[Request]) -> str:
    """Return the title: requests, failures, throughput and time to first token."""
    until = max(request.ended for request in requests)
    n_failed = sum(request.failed for request in requests)
    tokens = sum(request.tokens for request in requests)
    parts = [f"{len(requests):,} requests in {until:.0f} s, {n_failed:,} failed"]
    if until:
        parts.append(f"{tokens / until:,.0f} output tokens/s")
    if len(known := request_log.latencies(requests, "ttft")[1]):
        middle, high = np.percentile(known, (50, 99)) * 1e3
        parts.append(f"first token p50 {middle:,.0f} ms, p99 {high:,.0f} ms")
    return "   |   ".join(parts)


def draw(requests: list[Request], path: Path, limits: list[Limit]) -> None:
    """Draw six panels to a file."""
    edges = windows(requests)
    latency = [partial(_draw_latency, kind=kind, limits=limits) for kind in TITLES]
    panels: list[Panel] = [*latency, _draw_tokens, _draw_ends, _draw_levels]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(16, 8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
        for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
            axes.set(xlabel="seconds", xlim=(0, edges[-1]))
            panel(axes, requests, edges)
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        figure.suptitle(summary(requests), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=110)


def _draw_latency(
    axes: Axes, requests: list[Request], edges: Floats, kind: str, limits: list[Limit]
) -> None:
    times, values = request_log.latencies(requests, kind)
    values = values * 1e3
    axes.set(title=TITLES[kind], ylabel="milliseconds")
    if not len(values):
        return
    middles, found = over_time(times, values, edges)
    for percentile, line in reversed(found.items()):
        colour = PERCENTILES[percentile]
        label = f"p{percentile} {np.percentile(values, percentile):,.0f} ms"
        axes.fill_between(middles, line, color=colour, alpha=0.25, linewidth=0)
        axes.plot(middles, line, color=colour, label=label, marker="o", markersize=3)
    top = max(found[99])
    for limit in limits:
        if limit.kind == kind:
            label = f"p{limit.percentile:g} limit {limit.most:,.0f} ms"
            is_near = limit.most < 2 * top  # one far above would flatten the lines
            ends = ([0, edges[-1]], [limit.most] * 2) if is_near else ([], [])
            axes.plot(*ends, "--", color=FAILED, label=label)
            top = max(top, limit.most if is_near else 0)
    axes.set_ylim(0, 1.3 * top)
    axes.legend(ncols=2, loc="upper right")
    axes.set_xlabel(f"seconds; about {len(values) / len(middles):,.0f} values in each window")


def _draw_open(axes: Axes, requests: list[Request]) -> None:
    """Draw the number of open requests in grey, behind the rest."""
    behind = axes.twinx()
    moments, counts = request_log.open_requests(requests)
    behind.fill_between(moments, counts, step="post", color=OPEN, linewidth=0)
    behind.set(ylabel="open requests (grey)", ylim=(0, 1.3 * counts.max()))
    behind.yaxis.set_major_locator(MaxNLocator(integer=True))
    behind.grid(visible=False)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_tokens(axes: Axes, requests: list[Request], edges: Floats) -> None:
    _draw_open(axes, requests)
    times, tokens = request_log.token_times(requests)
    speed = np.histogram(times, edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(speed, edges, color=ANSWERED, baseline=None)
    axes.set(title="Throughput", ylabel="output tokens/s", ylim=(0, 1.3 * max(1.0, *speed)))


def _draw_ends(axes: Axes, requests: list[Request], edges: Floats) -> None:
    _draw_open(axes, requests)
    top = 0.0
    for name, failed, colour in (("answered", False, ANSWERED), ("failed", True, FAILED)):
        if ended := [request.ended for request in requests if request.failed is failed]:
            rate = np.histogram(ended, edges)[0] / np.diff(edges)
            label = f"{name} {len(ended):,}"
            axes.stairs(rate, edges, label=label, color=colour, baseline=None)
            top = max(top, *rate)
    axes.set(title="Requests that ended", ylabel="requests/s", ylim=(0, 1.3 * top))
    axes.legend(ncols=2, loc="upper right")


def _draw_levels(axes: Axes, requests: list[Request], _edges: Floats) -> None:
    levels = request_log.by_concurrency(requests)
    counts = [level.concurrency for level in levels]
    speeds = [level.tokens_per_second for level in levels]
    axes.plot(counts, speeds, color=ANSWERED, marker="o", markersize=7)
    label: Any = {"textcoords": "offset points", "ha": "center", "color": ANSWERED}
    for place in zip(counts, speeds, strict=True):
        axes.annotate(f"{place[1]:,.0f}", place, (0, 9), **label)
    axes.set(title="Throughput by concurrency", xlabel="open requests")
    axes.set(xlim=(0, 1.1 * max([1.0, *counts])), ylim=(0, 1.3 * max([1.0, *speeds])))
    axes.set_ylabel("output tokens/s", color=ANSWERED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = [(one.concurrency, one.ttft_p90 * 1e3) for one in levels if one.ttft_p90 is not None]
    if known:
        beside = axes.twinx()
        beside.plot(*zip(*known, strict=True), ":", color=LATENCY, marker="s", markersize=5)
        beside.set_ylabel("first token p90, ms (dotted)", color=LATENCY)
        beside.set_ylim(0, 1.3 * max(value for _, value in known))
        beside.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        beside.grid(visible=False)


def main() -> int:
    """Run the command and return its exit code."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("limits", nargs="?", type=parse_slo, default="")
    options = parser.parse_args()
    try:
        draw(request_log.read(options.requests), options.picture, options.limits)
    except (OSError, ValueError) as error:
        print(f"no picture: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
