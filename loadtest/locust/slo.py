"""Limits that a load test has to keep, such as "ttft:p99:2500 itl:p99:200 errors:1" (milliseconds, percent)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `most` milliseconds for a percentile of a latency, or percent of requests for `errors`."""

    kind: str
    percentile: float
    most: float


def parse_slo(text: str) -> list[Limit]:
    """Raises ValueError for what is not a list of limits."""
    return [_parse(limit) for limit in text.split()]


def _parse(text: str) -> Limit:
    kind, *numbers = text.split(":")
    try:
        if kind == "errors":
            (most,) = map(float, numbers)
            if 0 <= most <= 100:
                return Limit(kind, 0.0, most)
        elif kind in LATENCIES:
            percentile, most = float(numbers[0].removeprefix("p")), float(numbers[1])
            if len(numbers) == 2 and 0 < percentile <= 100 and 0 <= most < math.inf:
                return Limit(kind, percentile, most)
    except (IndexError, ValueError):
        pass
    raise ValueError(
        f"{text!r} is no limit; write {'|'.join(LATENCIES)}:p99:MILLISECONDS, or errors:PERCENT"
    )


def missed(
    limits: list[Limit], times: Mapping[str, Mapping[int, int]], n: int, n_failed: int
) -> Iterator[str]:
    """A line for each limit that was not kept. A figure that is not known keeps none.

    times: of each latency, how often each time came. n: requests, of which `n_failed` failed.
    """
    for limit in limits:
        if limit.kind == "errors":
            if not n or 100 * n_failed > limit.most * n:
                yield f"{n_failed} of {n} requests failed, at most {limit.most:g} % may"
            continue
        value = percentile(times.get(limit.kind, {}), limit.percentile)
        if value is None or value > limit.most:
            found = "unknown" if value is None else f"{value} ms"
            yield f"{limit.kind} p{limit.percentile:g} is {found}, at most {limit.most:g} ms may be"


def percentile(times: Mapping[int, int], percent: float) -> int | None:
    """The nearest rank's: the least time that so many percent of all do not exceed. None where there is none."""
    left = percent * sum(times.values()) / 100
    for value in sorted(times):
        left -= times[value]
        if left < 1e-6:  # what rounding leaves is less than a request
            return value
    return None
