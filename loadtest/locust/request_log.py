"""The requests that locustfile.py writes to a file, and their figures over time."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_LEVELS = 8  # of concurrency
_MIN_SHARE = 0.02  # of the time that a level must have lasted


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Times are seconds; `sent` and `ended` count from the first request."""

    sent: float
    ended: float
    ttft: float | None  # None if no token came
    e2e: float | None  # None without a whole answer
    gaps: tuple[float, ...]  # between events with text
    tokens: int
    failed: bool

    @property
    def event_times(self) -> Floats:
        """Arrivals of the events with text."""
        first = [] if self.ttft is None else [self.sent + self.ttft]
        return np.cumsum([*first, *self.gaps])


@dataclass(frozen=True, slots=True)
class Level:
    """Figures of the time with about `concurrency` open requests."""

    concurrency: float
    tokens_per_second: float
    ttft_p90: float | None  # of requests sent then, in seconds


def read(path: Path) -> list[Request]:
    """Read requests in the order of sending. Raises ValueError for a file without any."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["sent"]))
    if not rows:
        raise ValueError(f"{path} holds no request")
    first = float(rows[0]["sent"])
    return [
        Request(
            sent=float(row["sent"]) - first,
            ended=float(row["ended"]) - first,
            ttft=float(row["ttft"]) if row["ttft"] else None,
            e2e=float(row["e2e"]) if row["e2e"] else None,
            gaps=tuple(map(float, row["gaps"].split())),
            tokens=int(row["tokens"]),
            failed=bool(row["error"]),
        )
        for row in rows
    ]


def latencies(requests: list[Request], kind: str) -> tuple[Floats, Floats]:
    """Return the latencies of answered requests, in seconds, after their times.

    The times are those of sending, and for `itl` those of the events that end the gaps.
    """
    answered = [request for request in requests if not request.failed and request.ttft is not None]
    if kind == "itl":
        times = [request.event_times[1:] for request in answered]
        return np.concatenate([*times, []]), np.array([gap for r in answered for gap in r.gaps])
    known = [request for request in answered if getattr(request, kind) is not None]
    return np.array([r.sent for r in known]), np.array([getattr(r, kind) for r in known])


def token_times(requests: list[Request]) -> tuple[Floats, Floats]:
    """Return the arrivals of text, and for each an equal share of its request's tokens."""
    times = [request.event_times for request in requests]
    counts = np.array([len(arrivals) for arrivals in times])
    shares = [request.tokens for request in requests] / np.maximum(1, counts)
    return np.concatenate(times), np.repeat(shares, counts)


def open_requests(requests: list[Request]) -> tuple[Floats, NDArray[np.int64]]:
    """Return the times at which requests start or end, and the number open after each."""
    moments = np.array([r.sent for r in requests] + [r.ended for r in requests])
    changes = np.repeat([1, -1], len(requests))
    order = np.lexsort((changes, moments))  # at equal times, ends come before starts
    return moments[order], np.cumsum(changes[order])


def by_concurrency(requests: list[Request]) -> list[Level]:
    """Group the time by the number of open requests, in MAX_LEVELS equal ranges or fewer."""
    moments, counts = open_requests(requests)
    seconds = np.diff(moments, append=moments[-1])
    width = max(1, -(-counts.max() // MAX_LEVELS))
    level = (counts + width - 1) // width  # 0: no open request

    def level_at(times: Floats) -> NDArray[np.int64]:
        return np.take(level, np.searchsorted(moments, times, side="right") - 1)

    times, tokens = token_times(requests)
    sent, ttft = latencies(requests, "ttft")
    found = []
    for i in range(1, MAX_LEVELS + 1):
        lasted = seconds[level == i].sum()
        if lasted and lasted >= _MIN_SHARE * seconds.sum():
            mean = float(seconds[level == i] @ counts[level == i] / lasted)
            first = ttft[level_at(sent) == i]
            p90 = float(np.percentile(first, 90)) if len(first) else None
            found.append(Level(mean, float(tokens[level_at(times) == i].sum() / lasted), p90))
    return found
