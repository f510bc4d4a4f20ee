"""One request in one form for every protocol: its deltas, its samples, its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.errors import EngineError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.builder import RequestOptions
from kvasir.server.requests.completion import Delta, RequestState, make_choices
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel
from tests.kit.serving import EOS, serving, small_tokenizer


async def request(
    served: ServedModel, *, n: int = 1, seed: int = 0, ignore_eos: bool = False
) -> CompletionRequest:
    options = RequestOptions(
        prompts=[[5]],
        params=SamplingParams(max_tokens=1, ignore_eos=ignore_eos),
        max_tokens=3,
        default_max_tokens=3,
        seed=seed,
        n=n,
    )
    return await served.builder.build(options, RequestState("", 0.0))


async def test_silence_is_reported_after_the_first_output() -> None:
    async with serving() as served:
        served.runner.hold()
        async with served.model.complete(
            await request(served.model, ignore_eos=True)
        ) as completion:
            deltas = completion.deltas(0.001)
            waiting = asyncio.ensure_future(anext(deltas))
            served.runner.allow(1)
            assert len(await waiting) == 1
            assert await anext(deltas) == []
            assert await anext(deltas) == []
            served.runner.release()
            rest: list[Delta] = [delta async for batch in deltas for delta in batch]
    assert [delta.finish_reason for delta in rest] == [None, FinishReason.LENGTH]
    assert completion.n_completion_tokens == 3
    assert completion.seconds_to_first_token is not None


async def test_deltas_before_a_failure_come_first() -> None:
    async with serving() as served:
        served.runner.hold()
        async with served.model.complete(
            await request(served.model, ignore_eos=True)
        ) as completion:
            served.runner.allow(2)
            await asyncio.to_thread(served.runner.wait_until_held)
            served.model.engine.give_up()  # both outputs and the failure wait in the queue
            deltas = completion.deltas()
            assert [delta.n_tokens for delta in await anext(deltas)] == [1, 1]
            with pytest.raises(EngineError):
                await anext(deltas)


async def test_samples_share_the_prompt_and_the_seed_and_differ_in_their_index() -> None:
    async with serving() as served:
        wanted = await request(served.model, n=2, seed=9)
        ignoring = await request(served.model, ignore_eos=True)
    wanted = replace(wanted, caller=Caller("team"), priority=2)
    choices = make_choices(wanted, small_tokenizer(), count(40))
    assert [choice.sequence.id for choice in choices] == [40, 41]
    assert {(one.sequence.owner, one.sequence.priority) for one in choices} == {("team", 2)}
    assert [(c.sequence.params.seed, c.sequence.params.sample_index) for c in choices] == [
        (9, 0),
        (9, 1),
    ]
    assert choices[0].sequence.ending_ids == {EOS}
    assert make_choices(ignoring, small_tokenizer(), count())[0].sequence.ending_ids == frozenset()


async def test_samples_of_a_prompt_share_its_prefill() -> None:
    """Each runs only the tokens after the last whole block, at least two; without a cache, all."""
    for cache_bytes, n_run in ((2**20, 21 + 3 * 5), (0, 4 * 21)):
        async with serving(cache_bytes=cache_bytes) as served:
            body = {"prompt": list(range(1, 22)), "n": 4, "max_tokens": 2, "ignore_eos": True}
            assert (await served.client.post("/v1/completions", json=body)).status_code == 200
            assert sum(n_prefill for _, n_prefill in served.runner.batches) == n_run
