"""Limits of load tests, against lists that are sorted and counted."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from random import Random

import pytest

from loadtest.locust.slo import Limit, missed, parse_slo, percentile


@pytest.mark.parametrize("seed", range(20))
def test_a_percentile_is_the_nearest_ranks(seed: int) -> None:
    random = Random(seed)
    values = sorted(random.choices(range(random.randint(1, 500)), k=random.randint(1, 3000)))
    for percent in ("0.1", "1", "7", "50", "90", "99", "99.9", "100"):
        rank = math.ceil(Fraction(percent) * len(values) / 100)
        assert percentile(Counter(values), float(percent)) == values[rank - 1], percent


def test_nothing_has_no_percentile() -> None:
    assert percentile({}, 50) is None


def test_limits_are_read() -> None:
    assert parse_slo("ttft:p99:2500  itl:99.9:40 errors:1.5") == [
        Limit("ttft", 99, 2500),
        Limit("itl", 99.9, 40),
        Limit("errors", 0, 1.5),
    ]
    assert parse_slo("") == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "ttft",
            "ttft:p99",
            "ttft:p99:x",
            "ttft:p99:1:2",
            "ttft:p0:1",
            "ttft:p101:1",
            "ttft:p99:nan",
            "ttft:p99:inf",
        ),
        *(
            "ttft:p99:-1",
            "tpot:p99:1",
            "errors",
            "errors:101",
            "errors:-1",
            "errors:nan",
            "errors:1:2",
            ":",
            "p99:1",
        ),
    ],
)
def test_what_is_no_limit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a limit") as raised:
        parse_slo(f"errors:1 {text}")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("seed", range(10))
def test_a_limit_is_missed_by_more_than_it_and_not_by_as_much(seed: int) -> None:
    random = Random(seed)
    values = [random.randrange(1000) for _ in range(random.randint(1, 200))]
    percent = random.choice((50, 90, 99))
    value = sorted(values)[math.ceil(percent * len(values) / 100) - 1]
    times = {"itl": Counter(values)}
    assert list(missed([Limit("itl", percent, value)], times, 1, 0)) == []
    (line,) = missed([Limit("itl", percent, value - 0.5)], times, 1, 0)
    assert line.startswith(f"itl p{percent} is {value} ms")


def test_errors_are_a_share_of_requests_and_unknown_is_missed() -> None:
    limits = parse_slo("errors:1")
    assert list(missed(limits, {}, 200, 2)) == []
    assert list(missed(limits, {}, 200, 3)) == ["3 of 200 requests failed; the limit is 1 %"]
    assert list(missed(limits, {}, 0, 0)) == ["0 of 0 requests failed; the limit is 1 %"]
    assert list(missed(parse_slo("ttft:p99:1"), {}, 1, 0)) == [
        "ttft p99 is unknown; the limit is 1 ms"
    ]
