"""The door: bounds, places given back whatever happens, times to come back."""

from __future__ import annotations

import asyncio

import pytest

from server.admission import Admission, Phase, check_length
from server.engine.engine import Engine
from server.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnavailableError
from tests.fake_runner import FakeRunner


def opened(**limits: int) -> Admission:
    admission = Admission(**({"max_num_seqs": 2, "max_queue": 1} | limits))
    admission.phase = Phase.READY
    return admission


async def test_no_more_than_run_and_wait_are_inside_and_a_leaver_makes_room() -> None:
    admission = opened()
    with admission.admit(1):
        with admission.admit(2):
            with pytest.raises(OverloadedError) as caught, admission.admit(1):
                pass
            assert caught.value.retry_after is not None
            assert caught.value.retry_after >= 1
        with admission.admit(2):
            pass


async def test_places_are_given_back_when_a_request_fails() -> None:
    admission = opened()
    with pytest.raises(ZeroDivisionError), admission.admit(3):
        raise ZeroDivisionError
    assert admission.n_inside == 0
    await asyncio.wait_for(admission.wait_until_empty(), 1)


async def test_a_request_too_big_for_an_empty_server_is_not_told_to_come_back() -> None:
    with pytest.raises(InvalidRequestError, match="4 sequences; at most 3"), opened().admit(4):
        pass


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
async def test_nobody_enters_while_loading_or_draining(phase: Phase) -> None:
    admission = opened()
    admission.phase = phase
    with pytest.raises(UnavailableError) as caught, admission.admit(1):
        pass
    assert caught.value.retry_after


async def test_the_time_to_come_back_follows_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("server.admission.monotonic", lambda: now)
    admission = opened()
    assert admission.retry_after(5) == 1
    for _ in range(4):  # one leaves every 3 seconds
        now += 3.0
        with admission.admit(1):
            pass
    now += 3.0
    assert admission.retry_after(1) == 3
    assert admission.retry_after(3) == 9
    assert admission.retry_after(1000) == 60


def test_lengths_that_can_never_run_are_refused_with_the_numbers() -> None:
    """A prompt is there twice while it is computed, here in rows of one type."""
    long, small = (Engine(FakeRunner(9, max_model_len=10, budget_tokens=n), chunk_size=2) for n in (16, 15))
    check_length(6, 4, long)
    with pytest.raises(ContextLengthError, match="at most 10 tokens, but 11") as caught:
        check_length(6, 5, long)
    assert "6 in the prompt and 5 to generate" in caught.value.message
    check_length(6, 3, small)
    with pytest.raises(InvalidRequestError, match=r"6 in the prompt and 4 to .* 16 tokens .* of 15;") as refused:
        check_length(6, 4, small)
    assert "KVASIR_KV_CACHE_MEMORY" in refused.value.message
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        check_length(0, 4, long)
