"""The picture of a load test: latencies with their limits, and throughput, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from kvasir.loadtest.client import Answer
from kvasir.loadtest.locust.traffic import Limit

Floats = NDArray[np.float64]
Answers = list[Answer]

PERCENTILES = {50: "#1b4965", 90: "#4f93b8", 99: "#a9cfe3"}  # and their colours
TOKENS, FAILED = "#2a9d8f", "#d1495b"
TITLES = {"ttft": "Time to first token", "itl": "Time between tokens", "e2e": "Whole answer"}
STYLE: Any = {
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False,
}  # fmt: skip


def draw(answers: Answers, path: Path, limits: list[Limit]) -> None:
    """Draw four panels to a file."""
    start, edges = min(answer.sent for answer in answers), windows(answers)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(16, 8), layout="constrained")
        panels = list(figure.subplots(2, 2).flat)
        for axes, kind in zip(panels, TITLES, strict=False):
            times, values = latencies(answers, kind)
            axes.set(title=TITLES[kind], ylabel="milliseconds", xlabel="seconds")
            if len(values):
                kept = [limit for limit in limits if limit.kind == kind]
                _draw_latency(axes, times - start, values, edges, kept)
        _draw_tokens(panels[-1], answers, edges, start)
        for axes in panels:
            axes.set(xlim=(0, edges[-1]))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        figure.suptitle(summary(answers), x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=110)


def latencies(answers: Answers, kind: str) -> tuple[Floats, Floats]:
    """Return the milliseconds of answers without an error, after their times.

    The times are those of sending, and for `itl` those of the events that end the gaps. An answer
    that its client cancelled has no e2e.
    """
    pairs: list[tuple[float, float]] = []
    for answer in answers:
        if answer.error is not None:
            continue
        if kind == "itl":
            arrivals = np.unique(answer.event_times)
            pairs += zip(arrivals[1:], np.diff(arrivals), strict=True)
            continue
        has_latency = answer.ended if kind == "e2e" else answer.event_times
        if has_latency:
            pairs.append((answer.sent, getattr(answer, kind)))
    times, values = np.array(pairs).reshape(-1, 2).T
    return times, 1e3 * values


def token_times(answers: Answers) -> tuple[Floats, Floats]:
    """Return the arrivals of text, and for each an equal share of its answer's tokens."""
    counts = np.array([len(answer.event_times) for answer in answers])
    shares = [answer.n_tokens for answer in answers] / np.maximum(1, counts)
    return np.concatenate([answer.event_times for answer in answers]), np.repeat(shares, counts)


def windows(answers: Answers) -> Floats:
    """Return the edges of 6 to 40 equal windows, with about 100 requests in each if possible."""
    start = min(answer.sent for answer in answers)
    until = max(max(answer.sent, answer.ended, *answer.event_times, 0.0) for answer in answers)
    return np.linspace(0, max(until - start, 1e-3), min(40, max(6, len(answers) // 100)) + 1)


def over_time(
    times: Floats, values: Floats, edges: Floats
) -> tuple[Floats, dict[int, list[float]]]:
    """Return the middles of the windows that hold values, and the percentiles in each."""
    window = np.clip(np.digitize(times, edges) - 1, 0, len(edges) - 2)
    filled = np.unique(window)
    lines = {p: [float(np.percentile(values[window == i], p)) for i in filled] for p in PERCENTILES}
    return (edges[filled] + edges[filled + 1]) / 2, lines


def summary(answers: Answers) -> str:
    """Describe a load test in a line."""
    seconds = windows(answers)[-1]
    n_failed = sum(answer.error is not None for answer in answers)
    parts = [f"{len(answers):,} requests in {seconds:.0f} s, {n_failed:,} failed"]
    parts.append(f"{sum(answer.n_tokens for answer in answers) / seconds:,.0f} output tokens/s")
    if len(first := latencies(answers, "ttft")[1]):
        middle, high = np.percentile(first, (50, 99))
        parts.append(f"first token p50 {middle:,.0f} ms, p99 {high:,.0f} ms")
    return "   |   ".join(parts)


def _draw_latency(
    axes: Axes, times: Floats, values: Floats, edges: Floats, limits: list[Limit]
) -> None:
    middles, lines = over_time(times, values, edges)
    for percentile, line in reversed(lines.items()):
        colour = PERCENTILES[percentile]
        label = f"p{percentile} {np.percentile(values, percentile):,.0f} ms"
        axes.fill_between(middles, line, color=colour, alpha=0.25, linewidth=0)
        axes.plot(middles, line, color=colour, label=label, marker="o", markersize=3)
    top = max(lines[99])
    for limit in limits:
        label = f"p{limit.percentile:g} limit {limit.most:,.0f} ms"
        axes.axhline(limit.most, ls="--", color=FAILED, label=label)
        if limit.most < 2 * top:  # one far above would flatten the lines
            top = max(top, limit.most)
    axes.set_ylim(0, 1.3 * top)
    axes.legend(ncols=2, loc="upper right")
    axes.set_xlabel(f"seconds; about {len(values) / len(middles):,.0f} values in each window")


def _draw_tokens(axes: Axes, answers: Answers, edges: Floats, start: float) -> None:
    times, tokens = token_times(answers)
    speed = np.histogram(times - start, edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(speed, edges, color=TOKENS, baseline=None)
    failed = [answer.sent - start for answer in answers if answer.error is not None]
    if failed:
        label = f"sent, and failed: {len(failed):,}"
        axes.plot(failed, [0] * len(failed), "|", color=FAILED, markersize=20, label=label)
        axes.legend(loc="upper right")
    axes.set(title="Throughput", ylabel="output tokens/s", xlabel="seconds")
    axes.set_ylim(0, 1.3 * max(1.0, *speed))
