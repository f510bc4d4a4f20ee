"""Lengths, words and limits of a load test, and the number of its users over time.

Imports no Locust.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

LATENCIES = ("ttft", "itl", "e2e")
_TEXT = """the path of a file is read line by line and each value that it holds
becomes part of what is returned to whoever asked for its name"""
_NUMBER = r"(\d+(?:\.\d+)?)"
_LIMIT = re.compile(rf"(?:errors|({'|'.join(LATENCIES)}):p?{_NUMBER}):{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many milliseconds of a percentile, or percent of requests for `errors`."""

    kind: str
    percentile: float
    most: float


def parse_slo(text: str) -> list[Limit]:
    """Parse limits such as `ttft:p99:2500 errors:1`. Raises ValueError with the wrong one."""
    return [_parse_limit(limit) for limit in text.split()]


def _parse_limit(text: str) -> Limit:
    if match := _LIMIT.fullmatch(text):
        kind, percentile, most = match[1] or "errors", float(match[2] or 0), float(match[3])
        if most <= 100 if kind == "errors" else 0 < percentile <= 100:
            return Limit(kind, percentile, most)
    form = f"{'|'.join(LATENCIES)}:p99:MILLISECONDS, or errors:PERCENT"
    raise ValueError(f"{text!r} is not a limit; write {form}")


def draw_length(random: Random, median: float, spread: float) -> int:
    """Draw a length of at least 1 from a log-normal distribution with sigma `spread`."""
    return max(1, round(median * random.lognormvariate(0, spread)))


def draw_words(random: Random, n: int) -> str:
    """Draw n words. The text ends in a space, so that more can follow."""
    return " ".join(random.choices(_TEXT.split(), k=n)) + " "


def step(share: float, most: int) -> int:
    """Return the users at a share of the time: a quarter more in each quarter of it."""
    return max(1, round(most * (int(share * 4) + 1) / 4))


def spike(share: float, most: int) -> int:
    """Return the users at a share of the time: a quarter, and all in the middle third."""
    return most if 1 / 3 <= share < 2 / 3 else max(1, most // 4)


PACES: dict[str, Callable[[float, int], int] | None] = {
    "constant": None,
    "step": step,
    "spike": spike,
}
