"""/debug/batch shows each sequence in the engine, in each state, without text."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, serving


async def test_it_tells_states_and_lengths_apart() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=2)
    bodies = [
        ("first", "/v1/completions", {"prompt": [5, 5], "max_tokens": 4, "ignore_eos": True}),
        ("long", "/v1/completions", {"prompt": [5] * 20, "max_tokens": 4, "ignore_eos": True}),
        ("samples", "/v1/completions", {"prompt": [5] * 3, "n": 2}),
        ("tgi", "/", {"inputs": "a"}),
    ]
    async with serving(runner) as served:
        empty = {"max_num_seqs": 2, "sequences": list[Any]()}
        assert (await served.client.get("/debug/batch")).json() == empty
        runner.hold()
        posts = []
        for name, path, body in bodies:
            post = served.client.post(path, json=body, headers={"x-request-id": name})
            posts.append(asyncio.create_task(post))
            await served.submitted.acquire()
            if name == "long":
                runner.allow(2)  # the first prompt, and pieces of the second
                await asyncio.to_thread(runner.wait_until_held)
        sequences = (await served.client.get("/debug/batch")).json()["sequences"]
        runner.release()
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 4
        assert (await served.client.get("/debug/batch")).json() == empty
    ids = ["first", "long", "samples", "samples", "tgi"]
    assert [one["request_id"] for one in sequences] == ids
    assert len({one["sequence_id"] for one in sequences}) == 5
    first, long, *queued = sequences
    assert (first["state"], first["row"]) == ("running", 0)
    assert (first["prompt_tokens"], first["max_tokens"]) == (2, 4)
    assert first["generated_tokens"] >= 1
    assert (long["state"], long["row"]) == ("prefilling", 1)
    assert 0 < long["computed_tokens"] < 20
    for one in queued:
        assert (one["state"], one["row"], one["computed_tokens"]) == ("waiting", None, 0)
    assert min(one["seconds"] for one in sequences) >= 0
