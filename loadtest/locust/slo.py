"""Limits of a load test, such as "ttft:p99:2500 itl:p99:200 errors:1" (milliseconds, percent)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many milliseconds of a percentile, or percent of requests for `errors`."""

    kind: str
    percentile: float
    most: float


def parse_slo(text: str) -> list[Limit]:
    """Parse limits separated by spaces.

    Raises ValueError, with the part that is wrong, for anything else.
    """
    return [_parse_limit(limit) for limit in text.split()]


def _parse_limit(text: str) -> Limit:
    kind, *numbers = text.split(":")
    try:
        if kind == "errors":
            (most,) = map(float, numbers)
            if 0 <= most <= 100:
                return Limit(kind, 0.0, most)
        elif kind in LATENCIES:
            percentile, most = map(float, (numbers[0].removeprefix("p"), *numbers[1:]))
            if 0 < percentile <= 100 and 0 <= most < math.inf:
                return Limit(kind, percentile, most)
    except (IndexError, ValueError):
        pass
    form = f"{'|'.join(LATENCIES)}:p99:MILLISECONDS, or errors:PERCENT"
    raise ValueError(f"{text!r} is not a limit; write {form}")


def missed(
    limits: list[Limit], times: Mapping[str, Mapping[int, int]], n: int, n_failed: int
) -> Iterator[str]:
    """Yield a line for each limit that was missed. A limit on an unknown latency is missed.

    times: by latency, the count of each time in milliseconds. n: requests, of which `n_failed`
    failed.
    """
    for limit in limits:
        if limit.kind == "errors":
            if not n or 100 * n_failed > limit.most * n:
                yield f"{n_failed} of {n} requests failed; the limit is {limit.most:g} %"
            continue
        value = percentile(times.get(limit.kind, {}), limit.percentile)
        if value is None or value > limit.most:
            found = "unknown" if value is None else f"{value} ms"
            yield f"{limit.kind} p{limit.percentile:g} is {found}; the limit is {limit.most:g} ms"


def percentile(times: Mapping[int, int], percent: float) -> int | None:
    """Return the nearest-rank percentile of counted times, or None if there are none."""
    rank = percent * sum(times.values()) / 100
    for value in sorted(times):
        rank -= times[value]
        if rank < 1e-6:  # a rounding error is less than one request
            return value
    return None
