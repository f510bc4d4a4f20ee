"""Large answers: their size is bounded, alone and together."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from kvasir.server.api.http.pieces import LazyList, Pieces
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.requests.admission.answers import AnswerMemory
from kvasir.server.requests.text_worker import TextWorker
from tests.kit.dialects import COMPLETIONS
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, RawRequest, serving

MESSAGES = [{"role": "user", "content": "é"}]


TOO_LARGE: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": [[5] * 9] * 2, "logprobs": 3, "max_tokens": 9}, 2 * 9 * 500),
    ("/v1/completions", {"prompt": [5] * 9, "prompt_logprobs": 8, "n": 2}, 2 * 9 * 1000),
    ("/v1/completions", {"prompt": [5] * 60, "echo": True, "n": 16}, 16 * 60 * 14),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "logprobs": True, "n": 4, "max_tokens": 20},
        4 * 20 * 200,
    ),
    ("/generate", {"inputs": "a", "parameters": {"top_n_tokens": 9, "max_new_tokens": 9}}, 9900),
    ("/detokenize", {"tokens": [5] * 3000}, 3000 * 4),
]


async def test_an_answer_that_may_be_too_large_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.server.requests.admission.answers.MAX_BYTES", 8000)
    async with serving() as served:
        for path, body, figure in TOO_LARGE:
            response = await served.client.post(path, json=body)
            assert response.status_code == 400, response.text
            assert f"{figure} bytes, more than 8000;" in response.text
            assert not served.model.answers[False].n_held


async def test_without_a_length_an_answer_is_as_long_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.server.requests.admission.answers.MAX_BYTES", 2000)
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=64)) as served:
        body = {"messages": MESSAGES, "logprobs": True, "ignore_eos": True}
        response = await served.client.post("/v1/chat/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 10


async def test_answers_have_room_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.server.requests.admission.answers.MAX_BYTES", 9 * 500)
    body = {"prompt": [5] * 9, "prompt_logprobs": 3, "max_tokens": 1}
    async with serving() as served:
        memory, slow = served.model.answers[False], RawRequest(served.app, COMPLETIONS, body)
        await slow.begun.wait()
        assert memory.n_held == 9 * 500
        with memory.hold(3 * 9 * 500):
            full = await served.client.post(COMPLETIONS, json=body)
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            plain = await served.client.post(COMPLETIONS, json={"prompt": "a"})
            assert plain.status_code == 200
        slow.reads.set()
        await slow.task
        assert slow.sent[0]["status"] == 200
        assert not memory.n_held
        assert (await served.client.post(COMPLETIONS, json=body)).status_code == 200


async def test_a_lone_answer_has_room() -> None:
    with TextWorker() as worker, AnswerMemory(1, worker).hold(2**30):
        pass


@pytest.mark.parametrize("n_top", [0, 1, 20])
def test_scores_that_wait_take_no_more_memory_than_is_counted(n_top: int) -> None:
    tracemalloc.start()
    scores = [
        TokenLogprobs.of(1000 + i, -i / 7, [(j, -j / 3) for j in range(n_top)], 1000 + i)
        for i in range(2000)
    ]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= 1.1 * len(Pieces(LazyList(scores, repr, 1 + n_top)))
