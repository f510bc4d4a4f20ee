"""Limits of a load test, such as "ttft:p99:2500 itl:p99:200 errors:1" (milliseconds, percent)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LATENCIES = ("ttft", "itl", "e2e")
_NUMBER = r"(\d+(?:\.\d+)?)"
_LIMIT = re.compile(rf"(?:errors|({'|'.join(LATENCIES)}):p?{_NUMBER}):{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many milliseconds of a percentile, or percent of requests for `errors`."""

    kind: str
    percentile: float
    most: float


def parse_slo(text: str) -> list[Limit]:
    """Parse limits separated by spaces. Raises ValueError with the part that is wrong."""
    return [_parse_limit(limit) for limit in text.split()]


def _parse_limit(text: str) -> Limit:
    if match := _LIMIT.fullmatch(text):
        kind, percentile, most = match[1] or "errors", float(match[2] or 0), float(match[3])
        if most <= 100 if kind == "errors" else 0 < percentile <= 100:
            return Limit(kind, percentile, most)
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
    values = sorted(Counter(times).elements())
    rank = math.ceil(percent * len(values) / 100 - 1e-6)  # a rounding error is less than one value
    return values[max(rank, 1) - 1] if values else None
