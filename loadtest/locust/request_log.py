"""The requests of a load test, as loadtest/locust/locustfile.py keeps them in a file, and what they say together."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVELS = 8  # of concurrency, at most
_LEAST_SHARE = 0.02  # of the time that a level must have lasted


@dataclass(frozen=True, slots=True)
class Request:
    """Seconds; `sent` and `ended`, however that was, since the first was sent. ttft: None where no token came.

    e2e: to the end of a whole answer, else None. gaps: between events with text. tokens: those that came.
    """

    sent: float
    ended: float
    ttft: float | None
    e2e: float | None
    gaps: tuple[float, ...]
    tokens: int
    failed: bool

    @property
    def event_times(self) -> Floats:
        """When text came."""
        first = [] if self.ttft is None else [self.sent + self.ttft]
        return np.cumsum([*first, *self.gaps])


@dataclass(frozen=True, slots=True)
class Level:
    """What came while about so many requests were on their way. ttft_p90: of those sent then, in seconds."""

    concurrency: float
    tokens_per_second: float
    ttft_p90: float | None


def read(path: Path) -> list[Request]:
    """Requests by when they were sent. Raises ValueError for a file that holds none."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no request")
    first = min(float(row["sent"]) for row in rows)
    requests = [
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
    return sorted(requests, key=lambda request: request.sent)


def latencies(requests: list[Request], kind: str) -> tuple[Floats, Floats]:
    """When requests that were answered were sent, or for `itl` each event came, and what it took, in seconds."""
    answered = [request for request in requests if not request.failed and request.ttft is not None]
    if kind == "itl":
        times = [request.event_times[1:] for request in answered]
        values = [np.array(request.gaps) for request in answered]
        return np.concatenate([*times, []]), np.concatenate([*values, []])
    known = [(r.sent, value) for r in answered if (value := getattr(r, kind)) is not None]
    return np.array([sent for sent, _ in known]), np.array(
        [value for _, value in known], dtype=float
    )


def token_times(requests: list[Request]) -> tuple[Floats, Floats]:
    """When text came, and how many tokens each time: as many as in the request's other events."""
    times = [request.event_times for request in requests]
    shares = [
        np.full(len(at), request.tokens / max(1, len(at)))
        for at, request in zip(times, requests, strict=True)
    ]
    return np.concatenate([*times, []]), np.concatenate([*shares, []])


def on_their_way(requests: list[Request]) -> tuple[Floats, NDArray[np.int64]]:
    """Moments at which requests were sent or ended, in order, and how many are on their way from each to the next."""
    moments = np.array([r.sent for r in requests] + [r.ended for r in requests])
    changes = np.repeat([1, -1], len(requests))
    order = np.lexsort((changes, moments))  # at the same moment one ends before another is sent
    return moments[order], np.cumsum(changes[order])


def by_concurrency(requests: list[Request]) -> list[Level]:
    """Throughput by how many requests were on their way, which is in no more than LEVELS groups of equal width."""
    moments, counts = on_their_way(requests)
    seconds = np.diff(moments, append=moments[-1])
    width = max(1, -(-counts.max() // LEVELS))
    level: NDArray[np.int64] = (counts + width - 1) // width  # 0 is none on their way

    def level_at(times: Floats) -> NDArray[np.int64]:
        return np.take(level, np.searchsorted(moments, times, side="right") - 1)

    times, tokens = token_times(requests)
    at, (sent, ttft) = level_at(times), latencies(requests, "ttft")
    at_sent = level_at(sent)
    found = []
    for i in range(1, LEVELS + 1):
        lasted = seconds[level == i].sum()
        if lasted and lasted >= _LEAST_SHARE * seconds.sum():
            mean = float(seconds[level == i] @ counts[level == i] / lasted)
            first = ttft[at_sent == i]
            p90 = float(np.percentile(first, 90)) if len(first) else None
            found.append(Level(mean, float(tokens[at == i].sum() / lasted), p90))
    return found
