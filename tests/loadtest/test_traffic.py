"""Lengths of a load test are spread around their median; users follow the time; limits parse."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from kvasir.loadtest.locust.traffic import Limit, draw_length, draw_words, parse_slo, spike, step

INVALID = (
    "ttft ttft:p99 ttft:p99:x ttft:p99:1:2 ttft:p0:1 ttft:p101:1 ttft:p99:nan ttft:p99:inf "
    "ttft:p99:-1 tpot:p99:1 errors errors:101 errors:-1 errors:nan errors:1:2 : p99:1"
)


def test_limits_are_parsed() -> None:
    limits = [Limit("ttft", 99, 2500), Limit("itl", 99.9, 40), Limit("errors", 0, 1.5)]
    assert parse_slo("ttft:p99:2500  itl:99.9:40 errors:1.5") == limits
    assert parse_slo("") == []


@pytest.mark.parametrize("text", INVALID.split())
def test_an_invalid_limit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a limit") as raised:
        parse_slo(f"errors:1 {text}")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("middle", [3, 64, 1000])
def test_half_of_the_lengths_are_below_their_median(middle: int) -> None:
    """The median of 2,001 draws is more than 8 % off with a probability of 1e-6."""
    lengths = [draw_length(random, middle, 0.6) for random in [Random(0)] for _ in range(2001)]
    assert median(lengths) == pytest.approx(middle, rel=0.08, abs=1)
    assert min(lengths) >= 1
    assert len(set(lengths)) > 5
    assert {draw_length(Random(1), middle, 0) for _ in range(9)} == {middle}
    assert draw_length(Random(1), 0.01, 0) == 1


@pytest.mark.parametrize("n", [1, 2, 77])
def test_words_can_be_followed_by_more(n: int) -> None:
    text = draw_words(Random(0), n)
    assert len(text.split()) == n
    assert text.endswith(" ")


@pytest.mark.parametrize("most", [1, 2, 3, 16, 1001])
def test_paces_begin_low_and_reach_all_users(most: int) -> None:
    shares = [i / 1200 for i in range(1200)]
    steps = [step(share, most) for share in shares]
    spikes = [spike(share, most) for share in shares]
    assert steps == sorted(steps)
    assert {min(steps), min(spikes)} <= {max(1, most // 4), max(1, round(most / 4))}
    assert steps[900:] == [most] * 300
    assert spikes[400:800] == [most] * 400
    assert len(set(spikes[:400] + spikes[800:])) == 1
