"""Prompts have exact lengths and differ; loops keep their concurrency or their rate."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from kvasir.loadtest.client import Answer
from kvasir.loadtest.load import SUITES, Prompts, Workload, closed_loop, open_loop


def test_workloads_are_written_as_they_are_parsed() -> None:
    for text in (
        *map(str, chain(*SUITES.values())),
        "3x5/7",
        "2x64+32/8",
        "4x8-99/64",
        "long:2x600-900/8",
    ):
        assert str(Workload.parse(text)) == text
    workload = Workload.parse("8x512+64/32")
    assert workload == Workload(concurrency=8, input_len=64, output_len=32, shared_len=512)


@pytest.mark.parametrize(
    "text",
    [
        *("", "16x128", "0x128/64", "1x0/4", "1x4/0", "x4/4", "1x-4/4", "1x4/4 ", "1x4/words"),
        *("long:1x8/4", "long:1x8-9/vector", "long:1x5+8-9/4"),
        *("1x8-/4", "1x8-4/4", "16x128/64/4", "2x9+4/vector", "2x4/vector/4", "1x999999/vector"),
    ],
)
def test_an_invalid_workload_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Workload.parse(text)


def test_prompts_have_exact_lengths_and_differ_even_across_rounds() -> None:
    """But for the prefix of a round; the seed decides all of them."""

    def draw() -> list[list[tuple[int, ...]]]:
        prompts, workload = Prompts(vocab_size=1000, seed=1), Workload(4, 5, 6, shared_len=30)
        rounds = [prompts.bodies(workload, 8, {}) for _ in range(3)]
        return [[tuple(json.loads(body)["prompt"]) for body in bodies] for bodies in rounds]

    drawn = draw()
    prompts = [*chain(*drawn)]
    assert len({prompt[:30] for prompt in prompts}) == 3
    assert all(len({prompt[:30] for prompt in one_round}) == 1 for one_round in drawn)
    assert len({prompt[30:] for prompt in prompts}) == 24
    assert {len(prompt) for prompt in prompts} == {35}
    assert all(500 <= token_id < 1000 for prompt in prompts for token_id in prompt)
    assert draw() == drawn


def test_a_mix_has_one_long_prompt_in_ten() -> None:
    lengths = Workload.parse("long:2x600-900/8").inputs(40)
    assert len(lengths) == 40
    assert sum(600 <= n <= 900 for n in lengths) == 4
    assert sum(32 <= n <= 512 for n in lengths) == 36


def test_a_request_asks_for_an_exact_length_and_takes_more_fields() -> None:
    extra = {"cache_prompt": False, "temperature": 1}
    (body,) = Prompts(100, 0).bodies(Workload(1, 2, 6), 1, extra)
    fields = json.loads(body)
    del fields["prompt"]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert fields == {"max_tokens": 6, "ignore_eos": True} | stream | extra


@pytest.mark.parametrize(("text", "key"), [("9x8-64/same/4", "prompt"), ("9x8-64/vector", "input")])
def test_lengths_are_log_uniform_and_the_same_for_every_server(text: str, key: str) -> None:
    prompts, workload = Prompts(vocab_size=300, seed=1), Workload.parse(text)
    rounds = [
        [json.loads(body) for body in prompts.bodies(workload, 21, {"model": "m"})] for _ in "AB"
    ]
    inputs = [[body[key] for body in bodies] for bodies in rounds]
    if key == "prompt":
        assert {(body["num_beams"], body["max_tokens"]) for body in rounds[0]} == {
            (4, len(prompt)) for prompt in inputs[0]
        }
    else:
        inputs = [[text.split() for text in texts] for texts in inputs]
    assert not any("stream" in body or body["model"] != "m" for body in rounds[0])
    lengths = [[len(one) for one in of_server] for of_server in inputs]
    assert lengths[0] != lengths[1]
    assert sorted(lengths[0]) == sorted(lengths[1])
    scale = 1 if key == "prompt" else 0.75  # words of a token
    wanted = [scale * 8 * 8 ** (i / 20) for i in range(21)]
    assert sorted(lengths[0]) == pytest.approx(wanted, abs=1)
    assert inputs[0] != inputs[1]


class Clients:
    """Clients that wait until the test answers them."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.arrived = asyncio.Semaphore(0)
        self.most = 0

    async def ask(self, _: bytes) -> Answer:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(answered)
        self.most = max(self.most, len(self.waiting))
        self.arrived.release()
        await answered
        self.waiting.remove(answered)
        return Answer()


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
    """Requests are due at the times of a Poisson process, by a clock that the test holds."""
    clients = Clients()
    sent = [0.0]

    async def sleeping(seconds: float) -> None:
        sent.append(sent[-1] + seconds + 0.001)  # late, which must not add up
        await asyncio.sleep(0)

    clock = SimpleNamespace(time=lambda: sent[-1])
    parts = {"ensure_future": asyncio.ensure_future, "gather": asyncio.gather}
    fake = SimpleNamespace(sleep=sleeping, get_running_loop=lambda: clock, **parts)
    monkeypatch.setattr("kvasir.loadtest.load.asyncio", fake)
    loop = asyncio.ensure_future(open_loop(clients.ask, [b""] * 50, 4.0, np.random.default_rng(7)))
    for _ in range(50):
        await clients.arrived.acquire()
    assert clients.most == 50
    due = np.cumsum(np.random.default_rng(7).exponential(0.25, 50))
    assert sent[1:] == pytest.approx(due + 0.001)
    for answered in list(clients.waiting):
        answered.set_result(None)
    assert len(await loop) == 50
