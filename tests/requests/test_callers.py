"""Limits of a caller, against the clock that the tests give; tests/state counts on."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest

from kvasir.server.errors import OverloadedError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.state.memory import MemoryState


class Clock:
    """Seconds that pass when the test says so."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


async def test_the_tokens_of_a_minute_come_back_in_a_minute() -> None:
    clock = Clock()
    caller = Caller("alice", tokens_per_minute=600, state=MemoryState(clock=clock))
    async with caller.tokens(5000) as reservation:
        reservation.n_used = 900
    clock.seconds += 5
    with pytest.raises(OverloadedError, match="600 tokens a minute, and 850 are used") as caught:
        async with caller.tokens(1):
            pass
    assert caught.value.retry_after == 26  # 25 seconds would leave exactly 600 used
    clock.seconds += 25
    with pytest.raises(OverloadedError):
        async with caller.tokens(1):
            pass
    clock.seconds += 1
    async with caller.tokens(1):
        pass


async def test_without_a_limit_nothing_is_counted_against_a_later_one() -> None:
    caller = Caller("alice")
    async with caller.tokens(10**9) as reservation:
        reservation.n_used = 10**9
    caller.tokens_per_minute = 10
    async with caller.tokens(1):
        pass


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_requests_keeps_to_the_limit(seed: int) -> None:
    """Reservations that are given back late or never let at most one request exceed the limit."""
    chance, limit, largest, clock = random.Random(seed), 100, 80, Clock()
    caller = Caller("alice", tokens_per_minute=limit, state=MemoryState(clock=clock))
    n_used = n_granted = 0
    running, n_refused = list[AsyncExitStack](), 0
    for _ in range(500):
        clock.seconds += chance.expovariate(0.5)
        if running and chance.random() < 0.5:
            await running.pop(chance.randrange(len(running))).aclose()
        stack, reserved = AsyncExitStack(), chance.randint(1, largest)
        try:
            reservation = await stack.enter_async_context(caller.tokens(reserved))
        except OverloadedError:
            n_refused += 1
            continue
        reservation.n_used = chance.choice((0, reserved // 2, reserved))
        n_used += reservation.n_used
        n_granted += 1
        running.append(stack)
        assert n_used <= limit * (1 + (clock.seconds - Clock.seconds) / 60) + largest
    assert n_granted > 50
    assert n_refused > 50
    while running:
        await running.pop().aclose()


@pytest.mark.parametrize("n_used", [100, 101, 150, 5000])
async def test_who_waits_as_long_as_told_is_served_and_not_much_sooner(n_used: int) -> None:
    for early, is_served in ((0.0, True), (2.0, False)):
        clock = Clock()
        caller = Caller("alice", tokens_per_minute=60, state=MemoryState(clock=clock))
        async with caller.tokens(n_used) as reservation:
            reservation.n_used = n_used
        with pytest.raises(OverloadedError) as caught:
            async with caller.tokens(1):
                pass
        clock.seconds += (caught.value.retry_after or 0) - early
        stack = AsyncExitStack()
        if is_served:
            await stack.enter_async_context(caller.tokens(1))
        else:
            with pytest.raises(OverloadedError):
                await stack.enter_async_context(caller.tokens(1))
        await stack.aclose()
