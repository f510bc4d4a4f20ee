"""The door: bounds, places given back whatever happens, times to come back."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from server.engine.engine import Engine, StepStats
from server.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnavailableError
from server.requests.admission import PATIENCE, Admission, Demand, Phase, check_length
from server.requests.forecast import OPTIMISM, Backlog, Forecast, Work
from tests.fake_runner import FakeRunner


def opened(
    backlog: Backlog | None = None, forecast: Forecast | None = None, **limits: int
) -> Admission:
    stands = backlog or Backlog(2, [], [], 0)
    known: dict[str, Any] = {"max_num_seqs": 2, "max_queue": 1, "max_queue_tokens": 100} | limits
    admission = Admission(**known, forecast=forecast or Forecast(), backlog=lambda _turn: stands)
    admission.phase = Phase.READY
    return admission


def demand(
    n_sequences: int = 1, n_prompt: int = 1, n_new: int = 1, left: float = math.inf
) -> Demand:
    return Demand(n_sequences, n_prompt, 0.0, Work(n_prompt, n_new, left=left))


def measured(seconds_held: float, seconds_a_step: float = 0.0) -> Forecast:
    forecast = Forecast()
    forecast.ended(seconds_held)
    forecast.step(StepStats(1, 0, 0, 0, 0, 0, seconds_a_step), 100)
    return forecast


async def test_no_more_than_run_and_wait_are_inside_and_a_leaver_makes_room() -> None:
    admission = opened()
    with admission.admit(demand(1)):
        with admission.admit(demand(2)):
            with pytest.raises(
                OverloadedError, match="3 sequences are running or waiting, of at most 3"
            ) as caught:
                admission.check(demand(1))
            assert caught.value.retry_after == 1
            assert caught.value.reason == "overloaded"
        with admission.admit(demand(2)):
            pass


async def test_places_are_given_back_when_a_request_fails() -> None:
    admission = opened()
    with pytest.raises(ZeroDivisionError), admission.admit(demand(3)):
        raise ZeroDivisionError
    assert admission.n_inside == 0
    await asyncio.wait_for(admission.wait_until_empty(), 1)


async def test_a_request_too_big_for_an_empty_server_is_not_told_to_come_back() -> None:
    with (
        pytest.raises(InvalidRequestError, match="4 sequences; at most 3"),
        opened().admit(demand(4)),
    ):
        pass


@pytest.mark.parametrize(
    ("n_inside", "n_waiting", "n_prompt", "is_refused"),
    [
        (2, 60, 40, False),
        (2, 60, 41, True),
        (2, 0, 1000, False),  # it would wait alone
        (1, 60, 41, False),  # there is a row for it: what waits has not been looked at yet
        (0, 0, 1000, False),
    ],
)
async def test_the_prompts_that_wait_are_bounded_together(
    n_inside: int, n_waiting: int, n_prompt: int, is_refused: bool
) -> None:
    waiting = [Work(n_waiting // 3, 1)] * 3
    admission = opened(Backlog(2, [], waiting, n_waiting), measured(8.0), max_queue=9)
    admission.n_inside = n_inside
    if not is_refused:
        admission.check(demand(1, n_prompt))
        return
    with pytest.raises(
        OverloadedError, match=f"{n_waiting} tokens are waiting, .* {n_prompt} .* than 100"
    ) as caught:
        admission.check(demand(1, n_prompt))
    assert caught.value.reason == "overloaded_tokens"
    assert (
        caught.value.retry_after == 4
    )  # one of the three has to leave: a row is free every 4 seconds


async def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_both_times() -> None:
    """Both rows are busy for 10 seconds, and one of them is for whoever waits already; three quarters are believed."""
    forecast = measured(30.0, 0.5)
    admission = opened(Backlog(2, [Work(0, 20, held=1.0)] * 2, [Work(0, 20)], 0), forecast)
    at_least = OPTIMISM * (10.0 + 4 * 0.5)
    assert admission.check(demand(n_new=4)) == math.inf
    admission.check(demand(n_new=4, left=at_least))
    with pytest.raises(
        OverloadedError, match=r"at least 9\.0 seconds, but .* allows 6\.5"
    ) as caught:
        admission.check(demand(n_new=4, left=6.5))
    assert caught.value.reason == "overloaded_deadline"
    assert caught.value.retry_after == math.ceil(at_least - 6.5)


@pytest.mark.parametrize(
    ("left", "run"), [(20.0, 1.0), (12.0, 1.0), (11.9, PATIENCE), (2.3, OPTIMISM)]
)
async def test_whoever_may_be_in_time_may_wait_for_its_row(left: float, run: float) -> None:
    """Whoever is expected to be, until what it needs would be too late; nobody is let in only to be shed at once."""
    n_ended = 20 if left > 10 else 1
    admission = opened(Backlog(1, [Work(0, n_ended)], [], 0), measured(30.0, 0.5))
    assert admission.check(demand(n_new=4, left=left)) == pytest.approx(left - run * 4 * 0.5)
    assert admission.check(demand(n_new=4, left=left)) >= OPTIMISM * n_ended * 0.5


async def test_what_is_sure_is_waited_for_whatever_was_usual() -> None:
    """Short texts came before long ones that cannot end early."""
    backlog = Backlog(
        2, [Work(0, 100, n_sure=100), Work(0, 100, n_sure=90)], [Work(0, 100, n_sure=20)] * 3, 0
    )
    admission = opened(backlog, measured(0.1, 0.5))
    admission.n_inside = 2
    with pytest.raises(OverloadedError, match="at least 45"):
        admission.check(demand(left=20.0))
    assert [admission.retry_after(n) for n in (1, 2, 3, 4)] == [34, 38, 42, 45]


async def test_nobody_is_refused_for_a_time_that_was_not_measured_or_need_not_wait() -> None:
    full = Backlog(2, [Work(50, 20)] * 2, [Work(50, 20)] * 5, 0)
    assert opened(full).check(demand(left=0.001)) == 0.001
    assert (
        opened(Backlog(2, [Work(0, 20)], [], 0), measured(30.0, 0.5)).check(
            demand(n_new=99, left=0.1)
        )
        == 0.1
    )


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
async def test_nobody_enters_while_loading_or_draining(phase: Phase) -> None:
    admission = opened()
    admission.phase = phase
    with pytest.raises(UnavailableError) as caught, admission.admit(demand()):
        pass
    assert caught.value.retry_after


async def test_the_time_to_come_back_follows_the_measured_rate() -> None:
    """Two rows, each held for 6 seconds: one leaves every 3 seconds."""
    assert opened().retry_after(5) == 1
    admission = opened(forecast=measured(6.0))
    assert [admission.retry_after(n) for n in (1, 3, 1000)] == [3, 9, 60]


def test_lengths_that_can_never_run_are_refused_with_the_numbers() -> None:
    """A prompt is there twice while it is computed, here in rows of one type."""
    long, small = (
        Engine(FakeRunner(9, max_model_len=10, budget_tokens=n), chunk_size=2) for n in (16, 15)
    )
    check_length(6, 4, long)
    with pytest.raises(ContextLengthError, match="at most 10 tokens, but 11") as caught:
        check_length(6, 5, long)
    assert "6 in the prompt and 5 to generate" in caught.value.message
    check_length(6, 3, small)
    with pytest.raises(
        InvalidRequestError, match=r"6 in the prompt and 4 to .* 16 tokens .* of 15;"
    ) as refused:
        check_length(6, 4, small)
    assert "KVASIR_KV_CACHE_MEMORY" in refused.value.message
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        check_length(0, 4, long)
