"""TGI's routes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kit.dialects import GENERATE, GENERATE_STREAM, JSON, post, stream
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import EOS, VOCAB_SIZE, Served, saying, serving, small_tokenizer

tokenizer = small_tokenizer()


async def generate(served: Served, inputs: str, **parameters: Any) -> JSON:
    return await post(served, GENERATE, inputs=inputs, parameters=parameters)


async def stream_of(served: Served, inputs: str, **parameters: Any) -> list[JSON]:
    return await stream(served, GENERATE_STREAM, inputs=inputs, parameters=parameters)


async def test_greedy_unless_asked_to_sample() -> None:
    async with serving() as served:
        expected = tokenizer.decode(served.runner.greedy(tokenizer.encode("def").ids, 5))
        greedy = await generate(served, "def", max_new_tokens=5, ignore_eos=True)
        assert greedy == {"generated_text": expected}
        sampling = {"max_new_tokens": 5, "do_sample": True, "details": True}
        sampled = [await generate(served, "def", **sampling) for _ in range(3)]
        assert len({answer["generated_text"] for answer in sampled}) > 1
        seed = sampled[0]["details"]["seed"]
        assert await generate(served, "def", **sampling, seed=seed) == sampled[0]


async def test_details_hold_every_token_with_its_alternatives() -> None:
    async with serving() as served:
        options = {"details": True, "decoder_input_details": True, "top_n_tokens": 2}
        answer = await generate(served, "def", max_new_tokens=4, ignore_eos=True, **options)
        ids = tokenizer.encode("def").ids
        expected = served.runner.greedy(ids, 4)
    details = answer["details"]
    assert [token["id"] for token in details["tokens"]] == expected
    assert [next(token["id"] for token in top) for top in details["top_tokens"]] == expected
    assert [token["id"] for token in details["prefill"]] == ids
    assert details["prefill"][0]["logprob"] is None
    assert (details["finish_reason"], details["seed"]) == ("length", None)
    assert (details["generated_tokens"], details["input_length"]) == (4, len(ids))


async def test_a_stream_has_an_event_for_each_token_and_ends_with_the_text() -> None:
    async with serving() as served:
        sampling = {"max_new_tokens": 9, "seed": 4, "do_sample": True, "ignore_eos": True}
        whole = await generate(served, "def", **sampling)
        events = await stream_of(served, "def", **sampling, top_n_tokens=1)
    assert [event["index"] for event in events] == list(range(1, 10))
    shown = [event["token"]["text"] for event in events if not event["token"]["special"]]
    assert "".join(shown) == whole["generated_text"]
    assert all(
        event["generated_text"] is None and event["details"] is None for event in events[:-1]
    )
    assert events[-1]["generated_text"] == whole["generated_text"]
    counts = {"generated_tokens": 9, "input_length": 1}
    assert events[-1]["details"] == counts | {"finish_reason": "length", "seed": 4}
    assert all(len(event["top_tokens"]) == 1 for event in events)


async def test_finish_reasons_are_tgis() -> None:
    async with serving(saying("json.load", n_prompt=1)) as served:
        ended = await stream_of(served, "x", max_new_tokens=30, return_full_text=True)
        assert ended[-1]["details"]["finish_reason"] == "eos_token"
        assert ended[-1]["generated_text"] == "xjson.load"
        end = {"id": EOS, "text": "<|endoftext|>", "special": True}
        assert ended[-1]["token"] == ended[-1]["token"] | end
        stopped = await stream_of(served, "x", max_new_tokens=30, stop=[".lo"])
        assert stopped[-1]["details"]["finish_reason"] == "stop_sequence"
        assert stopped[-1]["generated_text"] == "json"
        assert "".join(event["token"]["text"] for event in stopped) == "json"


async def test_the_base_url_answers_whole_or_streamed() -> None:
    """As huggingface_hub's InferenceClient(URL): the same answers, in a list or as a stream."""
    no_ops = {"adapter_id": None, "best_of": 1, "watermark": False}
    body = {"inputs": "def", "parameters": no_ops | {"max_new_tokens": 4, "details": True}}
    async with serving() as served:
        expected = await generate(served, "def", max_new_tokens=4, details=True)
        whole = await served.client.post("/", json=body | {"stream": False})
        streamed = await served.client.post("/", json=body | {"stream": True})
        usual = await served.client.post("/generate_stream", json=body)
        wrong = await served.client.post("/", json=body | {"parameters": {"best_of": 2}})
    assert whole.json() == [expected]
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.text == usual.text
    assert (wrong.status_code, wrong.json()["error_type"]) == (400, "validation")
    assert "parameters.best_of" in wrong.json()["error"]


async def test_info_tells_the_limits() -> None:
    """Without a length there are a hundred tokens, or as many as there is room for."""
    one = {"max_new_tokens": 1}
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=128)) as served:
        answer = (await served.client.get("/info")).json()
        longest = "x" * answer["max_input_tokens"]
        await generate(served, longest, **one)
        await post(served, GENERATE, status=400, inputs=f"{longest}x", parameters=one)
        cut = await generate(served, "def read", truncate=1, details=True, **one)
        unlimited = await generate(served, "x", details=True, ignore_eos=True)
    assert (answer["model_id"], answer["model_device_type"]) == ("fake-model", "cpu")
    assert answer["max_total_tokens"] == 128
    assert cut["details"]["input_length"] == 1
    assert unlimited["details"]["generated_tokens"] == 100


async def test_best_of_returns_the_likeliest_sample_and_the_others() -> None:
    async with serving() as served:
        options = {"max_new_tokens": 5, "do_sample": True, "seed": 7, "details": True}
        best = await generate(served, "def", **options, best_of=4, return_full_text=True)
        plain = await generate(served, "def", **options)
        endless = await generate(served, "def", max_new_tokens=-1, details=True, ignore_eos=True)
        wrong = {"best_of": 2, "do_sample": True}
        await post(served, GENERATE_STREAM, status=400, parameters=wrong)
    others = best["details"].pop("best_of_sequences")
    samples = [best["details"] | {"generated_text": best["generated_text"]}, *others]
    scores = [np.mean([token["logprob"] for token in one["tokens"]]) for one in samples]
    assert scores == sorted(scores, reverse=True)
    assert len({one["generated_text"] for one in samples}) == 4
    assert f"def{plain['generated_text']}" in {one["generated_text"] for one in samples}
    assert endless["details"]["generated_tokens"] == 64 - 1
