"""/debug/batch shows each sequence in the engine, and /debug/steps what steps computed."""

from __future__ import annotations

import asyncio
from typing import Any

from kvasir.server.api.health import Steps
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


async def test_steps_tell_whose_tokens_they_computed() -> None:
    """All tokens of a prompt, in order, and then one of the answer in each step."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=2)
    async with serving(runner) as served:
        body = {"max_tokens": 3, "ignore_eos": True}
        for n_prompt in (20, 3):
            await served.client.post("/v1/completions", json=body | {"prompt": [5] * n_prompt})
        answer = (await served.client.get("/debug/steps")).json()
    steps = Steps.model_validate(answer, strict=True).model_dump()["steps"]
    agos = [step["ago"] for step in steps]
    assert agos == sorted(agos, reverse=True)
    assert agos[-1] > 0 < min(step["seconds"] for step in steps)
    parts = [part for step in steps for part in step["prompts"]]
    first, second = (part["sequence_id"] for part in (parts[0], parts[-1]))
    ends = [0, *(part["start"] + part["tokens"] for part in parts if part["sequence_id"] == first)]
    assert [part["start"] for part in parts if part["sequence_id"] == first] == ends[:-1]
    assert {part["prompt_tokens"] for part in parts} == {20, 3}
    assert ends[-1] == 20
    assert min(part["waited"] for part in parts) >= 0
    streams = [number for step in steps for number in step["streams"]]
    assert streams == [first, first, second, second]
