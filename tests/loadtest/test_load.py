"""Prompts are exact and never alike; loops keep to their concurrency, or their rate."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.load import SUITE, Prompts, Workload, closed_loop, open_loop
from loadtest.sse_client import StreamedCompletion


@pytest.mark.parametrize("text", [*map(str, SUITE), "3x5/7", "2x64+32/8"])
def test_workloads_are_written_as_they_are_read(text: str) -> None:
    assert str(Workload.parse(text)) == text


def test_the_parts_of_a_workload() -> None:
    workload = Workload.parse("8x512+64/32")
    assert workload == Workload(concurrency=8, input_len=64, output_len=32, shared_len=512)
    assert workload.n_prompt_tokens == 576


@pytest.mark.parametrize(
    "text", ["", "16x128", "0x128/64", "1x0/4", "1x4/0", "x4/4", "1x-4/4", "1x4/4 "]
)
def test_what_is_no_workload(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Workload.parse(text)


def prompts_of(bodies: list[bytes]) -> list[list[int]]:
    return [json.loads(body)["prompt"] for body in bodies]


def test_prompts_have_exact_lengths_and_are_never_alike_even_across_rounds() -> None:
    prompts = Prompts(vocab_size=1000, seed=1)
    drawn = [prompts_of(prompts.bodies(Workload(4, 20, 6), 8, {})) for _ in range(3)]
    everything = [tuple(prompt) for one_round in drawn for prompt in one_round]
    assert len(set(everything)) == 24
    assert {len(prompt) for prompt in everything} == {20}
    assert all(500 <= token_id < 1000 for prompt in everything for token_id in prompt)
    again = Prompts(vocab_size=1000, seed=1)
    assert [prompts_of(again.bodies(Workload(4, 20, 6), 8, {})) for _ in range(3)] == drawn


def test_a_shared_prefix_is_one_rounds_own() -> None:
    prompts = Prompts(vocab_size=1000, seed=1)
    first, second = (
        prompts_of(prompts.bodies(Workload(4, 5, 6, shared_len=30), 8, {})) for _ in range(2)
    )
    assert len({tuple(prompt[:30]) for prompt in first}) == 1
    assert len({tuple(prompt[30:]) for prompt in first}) == 8
    assert {len(prompt) for prompt in first} == {35}
    assert first[0][:30] != second[0][:30]


def test_a_request_asks_for_an_exact_length_and_takes_more_fields() -> None:
    (body,) = Prompts(100, 0).bodies(
        Workload(1, 2, 6), 1, {"cache_prompt": False, "temperature": 1}
    )
    fields = json.loads(body)
    del fields["prompt"]
    assert fields == {
        "max_tokens": 6,
        "temperature": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
    }


class Clients:
    """Answers when the test says so, and counts who is waiting."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.arrived = asyncio.Semaphore(0)
        self.most = 0

    async def ask(self, _: bytes) -> StreamedCompletion:
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(told)
        self.most = max(self.most, len(self.waiting))
        self.arrived.release()
        await told
        self.waiting.remove(told)
        return StreamedCompletion()


async def test_a_closed_loop_sends_the_next_request_when_one_is_answered() -> None:
    clients = Clients()
    loop = asyncio.ensure_future(closed_loop(clients.ask, [b""] * 7, 3))
    for _ in range(3):
        await clients.arrived.acquire()
    for n_sent in range(3, 8):
        assert len(clients.waiting) == 3
        clients.waiting[n_sent % 3].set_result(None)
        if n_sent < 7:
            await clients.arrived.acquire()
    while clients.waiting:
        clients.waiting[0].set_result(None)
        await asyncio.sleep(0)
    assert len(await loop) == 7
    assert clients.most == 3


async def test_an_open_loop_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are due at the times of a Poisson process of the wanted rate, by a clock that the test holds."""
    clients = Clients()
    sent = [0.0]

    async def sleeping(seconds: float) -> None:
        sent.append(sent[-1] + seconds + 0.001)  # late, which must not add up
        await asyncio.sleep(0)

    clock = SimpleNamespace(time=lambda: sent[-1])
    parts = {"ensure_future": asyncio.ensure_future, "gather": asyncio.gather}
    fake = SimpleNamespace(sleep=sleeping, get_running_loop=lambda: clock, **parts)
    monkeypatch.setattr("loadtest.load.asyncio", fake)
    loop = asyncio.ensure_future(open_loop(clients.ask, [b""] * 50, 4.0, np.random.default_rng(7)))
    for _ in range(50):
        await clients.arrived.acquire()
    assert clients.most == 50
    due = np.cumsum(np.random.default_rng(7).exponential(0.25, 50))
    assert sent[1:] == pytest.approx(due + 0.001)
    for told in list(clients.waiting):
        told.set_result(None)
    assert len(await loop) == 50
