"""Limits of load tests, against sorted lists."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from random import Random

import pytest

from kvasir.loadtest.locust.slo import Limit, missed, parse_slo, percentile

INVALID = (
    "ttft ttft:p99 ttft:p99:x ttft:p99:1:2 ttft:p0:1 ttft:p101:1 ttft:p99:nan ttft:p99:inf "
    "ttft:p99:-1 tpot:p99:1 errors errors:101 errors:-1 errors:nan errors:1:2 : p99:1"
)


@pytest.mark.parametrize("seed", range(10))
def test_a_percentile_is_the_nearest_ranks(seed: int) -> None:
    random = Random(seed)
    values = sorted(random.choices(range(random.randint(1, 500)), k=random.randint(1, 3000)))
    for percent in ("0.1", "1", "7", "50", "90", "99", "99.9", "100"):
        rank = math.ceil(Fraction(percent) * len(values) / 100)
        assert percentile(Counter(values), float(percent)) == values[rank - 1], percent
    assert percentile({}, 50) is None


def test_limits_are_parsed() -> None:
    limits = [Limit("ttft", 99, 2500), Limit("itl", 99.9, 40), Limit("errors", 0, 1.5)]
    assert parse_slo("ttft:p99:2500  itl:99.9:40 errors:1.5") == limits
    assert parse_slo("") == []


@pytest.mark.parametrize("text", INVALID.split())
def test_an_invalid_limit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a limit") as raised:
        parse_slo(f"errors:1 {text}")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_is_missed_above_it_and_kept_at_it(seed: int) -> None:
    random = Random(seed)
    values = [random.randrange(1000) for _ in range(random.randint(1, 200))]
    percent = random.choice((50, 90, 99))
    value = sorted(values)[math.ceil(percent * len(values) / 100) - 1]
    times = {"itl": Counter(values)}
    assert list(missed([Limit("itl", percent, value)], times, 1, 0)) == []
    (line,) = missed([Limit("itl", percent, value - 0.5)], times, 1, 0)
    assert line.startswith(f"itl p{percent} is {value} ms")


def test_errors_are_a_share_of_requests_and_an_unknown_latency_is_missed() -> None:
    limits = parse_slo("errors:1")
    assert list(missed(limits, {}, 200, 2)) == []
    for n, n_failed in ((200, 3), (0, 0)):
        (line,) = missed(limits, {}, n, n_failed)
        assert line.startswith(f"{n_failed} of {n} requests failed")
    (line,) = missed(parse_slo("ttft:p99:1"), {}, 1, 0)
    assert line.startswith("ttft p99 is unknown")
