"""/debug/batch shows each sequence in the engine, in each state, without text."""

from __future__ import annotations

import asyncio

from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE, serving


async def test_it_tells_states_and_lengths_apart() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=2)
    async with serving(runner) as served:
        assert (await served.client.get("/debug/batch")).json() == {
            "max_num_seqs": 2,
            "sequences": [],
        }
        runner.hold()
        posts = []
        for name, n_prompt in (("first", 2), ("long", 20), ("queued", 3)):
            body = {"prompt": [5] * n_prompt, "max_tokens": 4, "ignore_eos": True}
            post = served.client.post("/v1/completions", json=body, headers={"x-request-id": name})
            posts.append(asyncio.create_task(post))
            await served.submitted.acquire()
        runner.allow(2)  # the first prompt, and pieces of the second
        await asyncio.to_thread(runner.wait_until_held)
        response = await served.client.get("/debug/batch")
        runner.release()
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 3
        assert (await served.client.get("/debug/batch")).json()["sequences"] == []
    first, long, queued = response.json()["sequences"]
    assert [one["request_id"] for one in (first, long, queued)] == ["first", "long", "queued"]
    assert (first["state"], first["row"]) == ("running", 0)
    assert (first["prompt_tokens"], first["max_tokens"]) == (2, 4)
    assert first["generated_tokens"] >= 1
    assert (long["state"], long["row"]) == ("prefilling", 1)
    assert 0 < long["computed_tokens"] < 20
    assert (queued["state"], queued["row"], queued["computed_tokens"]) == ("waiting", None, 0)
    assert min(one["seconds"] for one in (first, long, queued)) >= 0


async def test_it_answers_of_every_sample_and_of_tgi() -> None:
    async with serving() as served:
        served.runner.hold()
        headers = {"x-request-id": "mine"}
        bodies = {"/v1/completions": {"prompt": "a", "n": 2}, "/": {"inputs": "a"}}
        posts = [
            asyncio.create_task(served.client.post(p, json=b, headers=headers))
            for p, b in bodies.items()
        ]
        for _ in posts:
            await served.submitted.acquire()
        sequences = (await served.client.get("/debug/batch")).json()["sequences"]
        served.runner.release()
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200, 200]
    assert [one["request_id"] for one in sequences] == ["mine"] * 3
    assert len({one["sequence_id"] for one in sequences}) == 3
