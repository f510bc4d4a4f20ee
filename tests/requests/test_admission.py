"""Admission: limits, places that are given back whatever happens, and retry times."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import BACKGROUND_PRIORITY
from kvasir.server.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from kvasir.server.requests.admission.forecast import LEAST_SHARE, Forecast, Snapshot, Work
from kvasir.server.requests.admission.queue import SLACK, Admission, Phase, check_length
from kvasir.server.requests.request import CompletionRequest, Prompt
from tests.kit.fake_runner import FakeRunner

IDLE = Snapshot(n_slots=2)


def opened(max_queue: int = 1) -> Admission:
    admission = Admission(max_num_seqs=2, max_queue=max_queue, max_queue_tokens=100)
    admission.phase = Phase.READY
    return admission


def demand(
    n_sequences: int = 1, n_prompt: int = 1, n_new: int = 1, left: float = math.inf
) -> tuple[CompletionRequest, Work]:
    prompts, params = [Prompt([5] * n_prompt, "")], SamplingParams(max_tokens=n_new)
    request = CompletionRequest(prompts=prompts, params=params, n=n_sequences)
    return request, Work(n_prompt, n_new, seconds_left=left)


def measured(seconds_held: float, seconds_a_step: float = 0.0) -> Forecast:
    forecast = Forecast()
    forecast.ended(seconds_held)
    forecast.step(StepStats(1, 0, 100, 0, 0, 0, 0, seconds_a_step))
    return forecast


def busy(rates: Forecast, running: list[Work], *waiting: Work, n_tokens: int = 0) -> Snapshot:
    """All slots are taken."""
    return Snapshot(rates, len(running), tuple(running), waiting, n_tokens)


async def test_capacity_bounds_the_sequences_inside_and_ends_make_room() -> None:
    admission = opened()
    with admission.admit(*demand(1), IDLE):
        with admission.admit(*demand(2), IDLE):
            with pytest.raises(OverloadedError, match=r"3 .* of at most 3") as caught:
                admission.check(*demand(1), IDLE)
            assert (caught.value.retry_after, caught.value.reason) == (1, "overloaded")
        with admission.admit(*demand(2), IDLE):
            pass


async def test_places_are_given_back_when_a_request_fails() -> None:
    admission = opened()
    with pytest.raises(ZeroDivisionError), admission.admit(*demand(3), IDLE):
        raise ZeroDivisionError
    assert admission.n_inside == 0
    await asyncio.wait_for(admission.empty.wait(), 1)


async def test_a_line_of_a_batch_leaves_an_idle_server_empty() -> None:
    """A drain waits for clients' sequences only."""
    admission = opened()
    request, work = demand(1)
    line = replace(request, priority=BACKGROUND_PRIORITY)
    with admission.admit(line, work, IDLE):
        assert admission.empty.is_set()
        with admission.admit(request, work, IDLE):
            assert not admission.empty.is_set()
        assert admission.empty.is_set()


async def test_a_request_too_big_for_an_idle_server_is_invalid() -> None:
    with pytest.raises(InvalidRequestError, match="4 sequences; at most 3"):
        opened().check(*demand(4), IDLE)


@pytest.mark.parametrize(
    ("n_inside", "n_waiting", "n_prompt", "is_refused"),
    [
        (2, 60, 40, False),
        (2, 60, 41, True),
        (2, 0, 1000, False),  # it would wait alone
        (1, 60, 41, False),  # a slot is free: the engine will schedule what waits
        (0, 0, 1000, False),
    ],
)
async def test_the_prompt_tokens_that_wait_are_bounded(
    n_inside: int, n_waiting: int, n_prompt: int, is_refused: bool
) -> None:
    waiting = (Work(n_waiting // 3, 1),) * 3
    snapshot = Snapshot(measured(8.0), 2, (), waiting, n_waiting)
    admission = opened(max_queue=9)
    admission.n_inside = n_inside
    if not is_refused:
        admission.check(*demand(1, n_prompt), snapshot)
        return
    with pytest.raises(OverloadedError, match=f"{n_waiting} .* {n_prompt} .* 100") as caught:
        admission.check(*demand(1, n_prompt), snapshot)
    assert caught.value.reason == "overloaded_tokens"
    assert caught.value.retry_after == 4  # one of the three has to end: a slot every 4 seconds


async def test_a_deadline_that_cannot_be_met_is_refused_with_both_times() -> None:
    """Both slots are busy for 10 seconds, and one of them is for the request that waits."""
    running, waiting = [Work(0, 20, seconds_held=1.0)] * 2, Work(0, 20)
    snapshot, admission = busy(measured(30.0, 0.5), running, waiting), opened()
    at_least = LEAST_SHARE * (10.0 + 4 * 0.5)
    assert admission.check(*demand(n_new=4), snapshot) == math.inf
    admission.check(*demand(n_new=4, left=at_least), snapshot)
    with pytest.raises(OverloadedError, match=r" 9\.0 seconds, .* 6\.5") as caught:
        admission.check(*demand(n_new=4, left=6.5), snapshot)
    assert caught.value.reason == "overloaded_deadline"
    assert caught.value.retry_after == math.ceil(at_least - 6.5)


@pytest.mark.parametrize(
    ("left", "run"), [(20.0, 1.0), (12.0, 1.0), (11.9, SLACK), (2.3, LEAST_SHARE)]
)
async def test_a_request_may_wait_until_it_would_be_late(left: float, run: float) -> None:
    """No request is admitted only to be shed at once."""
    n_ended = 20 if left > 10 else 1
    snapshot = busy(measured(30.0, 0.5), [Work(0, n_ended)])
    wait = opened().check(*demand(n_new=4, left=left), snapshot)
    assert wait == pytest.approx(left - run * 4 * 0.5)
    assert wait >= LEAST_SHARE * n_ended * 0.5


async def test_sure_tokens_count_whatever_was_usual() -> None:
    """Short texts came before long ones that cannot end early."""
    running = [Work(0, 100, n_certain=100), Work(0, 100, n_certain=90)]
    snapshot = busy(measured(0.1, 0.5), running, *[Work(0, 100, n_certain=20)] * 3)
    admission = opened()
    with pytest.raises(OverloadedError, match="at least 45"):
        admission.check(*demand(left=20.0), snapshot)
    assert [admission.retry_after(n, snapshot) for n in (1, 2, 3, 4)] == [34, 38, 42, 45]


async def test_a_deadline_is_not_refused_without_a_measurement_or_a_wait() -> None:
    unmeasured = busy(Forecast(), [Work(50, 20)] * 2, *[Work(50, 20)] * 5)
    assert opened().check(*demand(left=0.001), unmeasured) == 0.001
    free = Snapshot(measured(30.0, 0.5), 2, (Work(0, 20),))
    assert opened().check(*demand(n_new=99, left=0.1), free) == 0.1


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
async def test_no_request_is_admitted_while_loading_or_draining(phase: Phase) -> None:
    admission = opened()
    admission.phase = phase
    with pytest.raises(UnavailableError) as caught:
        admission.check(*demand(), IDLE)
    assert caught.value.retry_after


async def test_the_retry_time_follows_the_measured_rate() -> None:
    """Two slots, each held for 6 seconds: one is free every 3 seconds."""
    admission = opened()
    assert admission.retry_after(5, IDLE) == 1
    snapshot = Snapshot(measured(6.0), 2)
    assert [admission.retry_after(n, snapshot) for n in (1, 3, 1000)] == [3, 9, 60]


def test_lengths_that_can_never_run_are_refused_with_the_numbers() -> None:
    """A prompt is in memory twice while it is computed, here in rows of one type."""
    long, small = (
        Engine(FakeRunner(9, max_model_len=10, budget_tokens=n), chunk_size=2) for n in (16, 15)
    )
    check_length(6, 4, long)
    with pytest.raises(ContextLengthError, match=r"10 tokens.* 11.* 6 .* 5 "):
        check_length(6, 5, long)
    check_length(6, 3, small)
    with pytest.raises(ContextLengthError, match=r"6 .* 4 .* 16 .* 15;.*KVASIR_KV_CACHE"):
        check_length(6, 4, small)
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        check_length(0, 4, long)
