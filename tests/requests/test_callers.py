"""Tokens a minute, against the clock that the tests give."""

from __future__ import annotations

import random

import pytest

from kvasir.server.errors import OverloadedError
from kvasir.server.requests.admission.callers import Caller


def test_the_tokens_of_a_minute_come_back_in_a_minute() -> None:
    caller = Caller("alice", tokens_per_minute=600)
    caller.check_tokens(1000.0)
    caller.n_used += 900
    with pytest.raises(OverloadedError, match="600 tokens a minute, and 850 are used") as caught:
        caller.check_tokens(1005.0)
    assert caught.value.retry_after == 26  # 25 seconds would leave exactly 600 used
    with pytest.raises(OverloadedError):
        caller.check_tokens(1030.0)
    caller.check_tokens(1031.0)
    assert caller.n_used == 590
    caller.check_tokens(9000.0)
    assert caller.n_used == 0


def test_without_a_limit_nothing_is_counted_against_a_later_one() -> None:
    caller = Caller("alice")
    caller.n_used += 10**9
    caller.check_tokens(1.0)
    caller.tokens_per_minute = 10
    caller.check_tokens(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_requests_keeps_to_the_limit(seed: int) -> None:
    """Reservations that are given back late or never let at most one request exceed the limit."""
    chance, limit, largest = random.Random(seed), 100, 80
    caller = Caller("alice", tokens_per_minute=limit)
    now, n_used, n_granted, running, waits = 0.0, 0, 0, list[int](), list[tuple[float, int]]()
    for _ in range(500):
        now += chance.expovariate(0.5)
        if running and chance.random() < 0.5:
            reserved = running.pop(chance.randrange(len(running)))
            used = chance.choice((0, reserved // 2, reserved))
            caller.n_used -= reserved - used
            n_used += used
        try:
            caller.check_tokens(now)
        except OverloadedError as error:
            waits.append((caller.n_used, error.retry_after or 0))
            continue
        n_granted += 1
        reserved = chance.randint(1, largest)
        caller.n_used += reserved
        running.append(reserved)
        assert n_used <= limit * (1 + now / 60) + largest
    assert n_granted > 50
    for n_used_then, seconds in waits:
        left = n_used_then - seconds * limit / 60
        assert left < limit <= left + 2 * limit / 60
