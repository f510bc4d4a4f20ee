"""/v1/completions and /v1/models: every form of the answer against the runner's own oracle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvasir.model.records import GenerationDefaults
from kvasir.server.api.other_servers import IGNORED, NO_OPS
from kvasir.server.requests.admission.queue import Phase
from kvasir.server.text.detokenizer import token_name, token_text
from kvasir.server.text.fill_in_middle import FORMS, FillInMiddle
from tests.kit.chats import LONG, chatting
from tests.kit.dialects import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    JSON,
    assert_close,
    joined,
    post,
    stream,
)
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import (
    EOS,
    MODEL,
    VOCAB_SIZE,
    Served,
    beginning_with_end_of_text,
    fake_model_dir,
    saying,
    serving,
    small_tokenizer,
)

tokenizer = small_tokenizer()


async def complete(served: Served, **body: Any) -> JSON:
    return await post(served, COMPLETIONS, **body)


def log_softmax(row: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    return torch.tensor(row, dtype=torch.float64).log_softmax(-1).numpy()


PROMPTS = ["def read", "json", "漢字かな é漢🙂 ☃☃", "\x00\x1b[2J\u2028", "a <|endoftext|>b"]


def expected_choice(runner: FakeRunner, prompt: str | list[int], body: JSON) -> JSON:
    """Return a greedy choice as the model's own numbers give it; scores without their offsets."""
    whole = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    prompt_ids = whole[-(body.get("truncate_prompt_tokens") or len(whole)) :]
    new = runner.greedy(prompt_ids, body["max_tokens"])
    ids, n_top = prompt_ids + new, body.get("logprobs")
    rows = [None, *(log_softmax(runner.logits(ids[:end])) for end in range(1, len(ids)))]

    def likeliest(place: int, n: int) -> list[int]:
        return [*map(int, np.argsort(-rows[place], kind="stable")[:n]), ids[place]]

    def named(values: Callable[[int, int], Any], place: int) -> JSON | None:
        if rows[place] is None:
            return None
        top: JSON = {}
        for i in reversed(likeliest(place, n_top or 0)):  # of one name, the likeliest shows
            top[token_name(tokenizer, i)] = values(place, i)
        return top | {token_name(tokenizer, ids[place]): values(place, ids[place])}

    def score(place: int, token_id: int) -> float:
        return max(-9999.0, float(rows[place][token_id]))

    shown = tokenizer.decode(prompt_ids) if prompt_ids != whole or whole is prompt else prompt
    choice: JSON = {"text": shown * body["echo"] + tokenizer.decode(new)}
    choice |= {"finish_reason": "length", "logprobs": None}
    first = 0 if body["echo"] else len(prompt_ids)
    places = range(first, len(ids))
    if n_top is not None:
        choice["logprobs"] = {
            "tokens": [token_name(tokenizer, i) for i in ids[first:]],
            "token_logprobs": [None if rows[p] is None else score(p, ids[p]) for p in places],
            "top_logprobs": [named(score, p) for p in places] if n_top else None,
        }
    if body["return_token_ids"]:
        choice |= {"token_ids": new, "prompt_token_ids": prompt_ids}
        if n_top:
            choice["logprobs"]["top_token_ids"] = [
                named(lambda _, i: i, p) if p >= len(prompt_ids) else None for p in places
            ]
    if (n_scored := body.get("prompt_logprobs")) is not None:
        choice["prompt_logprobs"] = [None] + [
            {
                str(i): {
                    "logprob": score(p, i),
                    "rank": 1 + int((rows[p] > rows[p][i]).sum()),
                    "decoded_token": token_text(tokenizer, i),
                }
                for i in likeliest(p, n_scored)
            }
            for p in range(1, len(prompt_ids))
        ]
    return choice


def random_completion(rng: random.Random) -> tuple[JSON, list[str | list[int]]]:
    """Return a body in any of the forms of a prompt, and its prompts."""
    prompts: list[Any] = rng.sample(PROMPTS, rng.choice([1, 1, 2]))
    if rng.random() < 0.5:
        prompts = [tokenizer.encode(prompt).ids for prompt in prompts]
    body: JSON = {"prompt": prompts[0] if len(prompts) == 1 and rng.random() < 0.5 else prompts}
    body |= {"max_tokens": rng.randrange(6), "n": rng.choice([1, 2])}
    body |= {"logprobs": rng.choice([None, 0, 3, 20]), "prompt_logprobs": rng.choice([None, 0, 2])}
    body |= {name: rng.random() < 0.5 for name in ("echo", "return_token_ids")}
    if rng.random() < 0.2:
        prompts = body["prompt"] = [rng.choice(PROMPTS[:2])]
        body["truncate_prompt_tokens"] = rng.randrange(1, 4)
    return body | {"temperature": 0, "ignore_eos": True}, prompts


@pytest.mark.parametrize("seed", range(4))
async def test_greedy_completions_are_what_the_model_says(seed: int) -> None:
    """A token that is impossible has a score that JSON can hold."""
    rng, runner = random.Random(seed), FakeRunner(VOCAB_SIZE, max_model_len=200)
    draw = runner.logits

    def cutting(prefix: list[int]) -> Any:
        row = draw(prefix)
        row[tokenizer.encode("json").ids[-1]] = -np.inf
        return row

    runner.logits = cutting  # type: ignore[method-assign]
    async with serving(runner) as served:
        for _ in range(10):
            body, prompts = random_completion(rng)
            answer = await complete(served, **body)
            assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
            n_prompt = 0
            for index, choice in enumerate(answer["choices"]):
                expected = expected_choice(runner, prompts[index // body["n"]], body)
                assert choice.pop("index") == index
                if choice["logprobs"] is not None:
                    offsets = [*choice["logprobs"].pop("text_offset"), len(choice["text"])]
                    assert offsets == sorted(offsets)
                    assert len(offsets) == 1 + len(choice["logprobs"]["tokens"])
                assert_close(choice, expected)
                whole = prompts[index // body["n"]]
                n_whole = len(tokenizer.encode(whole).ids if isinstance(whole, str) else whole)
                n_prompt += min(n_whole, body.get("truncate_prompt_tokens", n_whole))
            n_new = len(answer["choices"]) * body["max_tokens"]
            assert answer["usage"] == {
                "prompt_tokens": n_prompt // body["n"],
                "completion_tokens": n_new,
                "total_tokens": n_prompt // body["n"] + n_new,
                "prompt_tokens_details": {"cached_tokens": 0},
            }


async def test_usage_tells_how_much_of_the_prompts_was_cached() -> None:
    """Each prompt counts once; a sample that reuses the first one's prompt does not count."""
    body = {"prompt": [[5] * 23, [6] * 3, [7] * 9], "max_tokens": 2, "n": 2}
    async with serving(cache_bytes=2**20) as served:
        cold = await complete(served, **body)
        warm = await complete(served, **body)
        events = await stream(served, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 20 + 0 + 4}
    assert events[-1]["usage"] == warm["usage"]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_key_learns_nothing_of_anothers_prompts(tmp_path: Path, is_shared: bool) -> None:
    """Unless that is set. A salt separates requests of one key too; all answers are the same."""
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    body = {"prompt": [5] * 23, "max_tokens": 4, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "a" * 9}], "max_tokens": 2}
    asked = (("one", None), ("two", None), ("one", None), ("one", "a"), ("two", "a"), ("one", "a"))
    texts, cached = set(), []

    async with serving(
        cache_bytes=2**20, api_key_file=path, share_prefix_cache=is_shared
    ) as served:

        async def ask(path: str, key: str, body: dict[str, Any]) -> tuple[str, int]:
            headers = {"authorization": f"Bearer {key}"}
            answer = (await served.client.post(path, json=body, headers=headers)).json()
            usage = answer["usage"]["prompt_tokens_details"]
            return str(answer["choices"]), usage["cached_tokens"]

        for key, salt in asked:
            text, n_cached = await ask("/v1/completions", key, body | {"cache_salt": salt})
            texts.add(text)
            cached.append(n_cached)
        path_of_chat = "/v1/chat/completions"
        chats = [(await ask(path_of_chat, "one", chat | {"cache_salt": s}))[1] for s in "aab"]
    assert len(texts) == 1
    assert cached == ([0, 20, 20, 0, 20, 20] if is_shared else [0, 0, 20, 0, 0, 20])
    assert (chats[0], chats[1] > 0, chats[2]) == (0, True, 0)


async def test_the_usage_so_far_is_in_every_event_of_a_stream_that_asks_for_it() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as served:
        events = await stream(
            served,
            COMPLETIONS,
            prompt="def",
            max_tokens=9,
            stream_options=options,
            ignore_eos=True,
            logprobs=0,
        )
    so_far = [event["usage"]["completion_tokens"] for event in events]
    assert so_far == [*range(1, 10), 9]
    assert {event["usage"]["prompt_tokens"] for event in events} == {
        events[-1]["usage"]["prompt_tokens"]
    }


async def test_choices_are_numbered_by_prompt_and_sample_0_equals_a_single_one() -> None:
    body = {"max_tokens": 8, "seed": 11, "ignore_eos": True}
    async with serving() as served:
        many = await complete(served, prompt=["def", "json"], n=3, **body)
        whole = [await complete(served, prompt=prompt, **body) for prompt in ("def", "json")]
    alone = [answer["choices"][0]["text"] for answer in whole]
    texts = [choice["text"] for choice in many["choices"]]
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    assert [texts[0], texts[3]] == alone
    assert len(set(texts)) > 2


@pytest.mark.parametrize("added", [False, True])
async def test_offsets_of_an_echoed_prompt_point_to_its_tokens(added: bool) -> None:
    """Special tokens in the text take their room in it; those that the tokenizer adds take none."""
    prompt = "a <|endoftext|>b☃c "
    long = "def read_json(path):\n    return json.load(path)\n" * 90  # tokenised in a thread
    framing = beginning_with_end_of_text()
    framing.post_processor = TemplateProcessing(
        "<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", EOS)]
    )
    model_dir = replace(
        fake_model_dir(max_model_len=6000), tokenizer=framing if added else tokenizer
    )
    expected = [0] * added + [0, 1, 2, 15, 16, 16, 16, 17, 18] + [19] * added
    body = {"echo": True, "logprobs": 0, "max_tokens": 1, "ignore_eos": True}

    async def offsets(**fields: Any) -> list[list[int]]:
        answer = await complete(served, **body, **fields)
        return [choice["logprobs"]["text_offset"] for choice in answer["choices"]]

    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=6000), model_dir=model_dir) as served:
        assert await offsets(prompt=prompt) == [[*expected, 19]]
        assert (await offsets(prompt=[long, prompt], n=2))[3] == [*expected, 19]
        of_what_is_left = [0, 1, 1, 1, 2, 3, 4] if not added else [0, 0, 0, 1, 2, 3, 3]
        assert await offsets(prompt=prompt, truncate_prompt_tokens=6) == [of_what_is_left]
        ids = tokenizer.encode(prompt).ids
        assert await offsets(prompt=ids) == [[0, 1, 2, 2, 3, 3, 3, 4, 5, 6]], (
            "special tokens do not show"
        )


async def test_a_stop_string_across_tokens_is_not_shown_and_frees_the_row() -> None:
    text = "path)\n    return json"
    async with serving(saying(text, n_prompt=len(tokenizer.encode("x").ids))) as served:
        events = await stream(
            served,
            COMPLETIONS,
            prompt="x",
            temperature=0,
            max_tokens=40,
            stop=["\n    re", "never"],
        )
        (choice,) = joined(COMPLETIONS, events)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("path)", "stop")
        again = await complete(
            served, prompt="x", temperature=0, max_tokens=40, stop="json", min_tokens=40
        )
        assert text in again["choices"][0]["text"]
        assert served.runner.kv.reserved_tokens == 0


async def test_the_end_of_text_token_ends_the_text_unless_ignored() -> None:
    async with serving(saying("json", n_prompt=1)) as served:
        body = {"prompt": "x", "temperature": 0, "max_tokens": 9}
        answer = (await complete(served, **body, logprobs=0))["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("json", "stop")
        assert answer["logprobs"]["tokens"][-1] == "<|endoftext|>"
        ignoring = await complete(served, **body, ignore_eos=True)
        assert ignoring["choices"][0]["finish_reason"] == "length"
        assert ignoring["usage"]["completion_tokens"] == 9
        stop_ids = tokenizer.encode("json").ids[:1]
        stopped = (await complete(served, **body, stop_token_ids=stop_ids))["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


async def test_special_tokens_around_a_prompt_can_be_left_out() -> None:
    model_dir = replace(fake_model_dir(), tokenizer=beginning_with_end_of_text())
    async with serving(model_dir=model_dir) as served:
        usual = await complete(served, prompt="json", max_tokens=1)
        without = await complete(served, prompt="json", max_tokens=1, add_special_tokens=False)
    n = len(tokenizer.encode("json").ids)
    assert (usual["usage"]["prompt_tokens"], without["usage"]["prompt_tokens"]) == (n + 1, n)


async def test_the_default_length_is_sixteen_or_what_there_is_room_for() -> None:
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=20)) as served:
        short = await complete(served, prompt=[5, 6], ignore_eos=True)
        assert short["usage"]["completion_tokens"] == 16
        long = await complete(served, prompt=[5] * 17, ignore_eos=True)
        assert long["usage"]["completion_tokens"] == 3


SYNONYMS: list[tuple[JSON, JSON]] = [
    ({"n_predict": 3}, {"max_tokens": 3}),
    ({"n_predict": -1}, {"max_tokens": 62}),
    ({"max_tokens": -1}, {"max_tokens": 62}),
    ({"max_completion_tokens": -1}, {"max_tokens": 62}),
    ({"repeat_penalty": 100.0}, {"repetition_penalty": 100.0}),
    ({"ignore_eos_token": True}, {"ignore_eos": True}),
]


async def test_other_servers_names_and_values_mean_the_same() -> None:
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=64)) as served:
        for theirs, ours in SYNONYMS:
            bias = {str(EOS): 100} if "ignore_eos" in ours else {"66": 10}
            body = {"prompt": [5, 6], "temperature": 0, "logit_bias": bias}
            answers = [await complete(served, **body | more) for more in (theirs, ours, {})]
            answer, same, without = (one["choices"] for one in answers)
            assert answer == same != without, theirs
        drawn = {"prompt": "a", "temperature": 100, "ignore_eos": True, "seed": -1}
        texts = [(await complete(served, **drawn))["choices"][0]["text"] for _ in range(2)]
        assert texts[0] != texts[1], "-1 draws a seed"


async def test_the_fingerprint_is_that_of_the_files() -> None:
    async with serving() as served, serving() as other:
        whole = await complete(served, prompt="a", max_tokens=2)
        chunks = await stream(served, COMPLETIONS, prompt="b", max_tokens=2)
        assert {one["system_fingerprint"] for one in chunks} == {whole["system_fingerprint"]}
        model_dir = other.model.model_dir
        manifest = model_dir.manifest.model_copy(update={"files": {"model.onnx": "0"}})
        other.model.model_dir = replace(model_dir, manifest=manifest)
        changed = await complete(other, prompt="a", max_tokens=2)
    assert changed["system_fingerprint"] != whole["system_fingerprint"]


async def test_the_fingerprint_is_the_same_after_a_request_that_came_too_early() -> None:
    """While the model loads, nobody knows its operators."""
    async with serving(speculate=True) as served, serving(speculate=True) as other:
        model, engine = other.model, other.model.engine.engine
        model.engine.engine, model.admission.phase = None, Phase.LOADING
        early = await other.client.post(COMPLETIONS, json={"prompt": "a"})
        model.engine.engine, model.admission.phase = engine, Phase.READY
        answers = [await complete(one, prompt="a", max_tokens=2) for one in (served, other)]
    assert early.status_code == 503
    assert answers[0]["system_fingerprint"] == answers[1]["system_fingerprint"]


async def test_fields_that_ask_for_nothing_are_accepted() -> None:
    no_ops = {name: values[-1] for name, values in NO_OPS.items()} | dict.fromkeys(IGNORED, "x")
    nulls = dict.fromkeys(("suffix", "regex", "grammar", "stream_options", "stop", "temperature"))
    more = {"logit_bias": {}, "model": MODEL, "top_k": -1, "length_penalty": 1}  # as good as 1.0
    body = {"prompt": "a", "max_tokens": 2, "seed": 5}
    async with serving() as served:
        plain = await complete(served, **body)
        same = await complete(served, **body | no_ops | nulls | more)
    assert same["choices"] == plain["choices"]


async def test_every_sampling_field_reaches_the_sampler() -> None:
    """Each field makes one token certain, or would change the text if it were ignored."""
    async with serving() as served:
        body = {"prompt": "a", "max_tokens": 4, "seed": 2, "ignore_eos": True}
        greedy = await complete(served, **body, temperature=0)
        for certain in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-9}):
            assert (await complete(served, **body, **certain))["choices"] == greedy["choices"]
        biased = await complete(served, **body, logit_bias={"66": 100})
        assert biased["choices"][0]["text"] == tokenizer.decode([66]) * 4
        penalised = await complete(
            served, **body, temperature=0, logit_bias={"66": 10}, repetition_penalty=100.0
        )
        assert penalised["choices"][0]["text"].count(tokenizer.decode([66])) < 4


async def test_the_models_defaults_hold_unless_the_request_sets_others() -> None:
    """Null counts as not given; TGI's routes have defaults of their own."""
    async with serving() as served:
        body = {"prompt": "a", "max_tokens": 12, "seed": 2, "ignore_eos": True}
        neutral = (await complete(served, **body))["choices"]
        greedy = (await complete(served, **body, temperature=0))["choices"]
        sampling = {"seed": 2, "do_sample": True, "max_new_tokens": 12, "ignore_eos": True}
        tgi = {"inputs": "a", "parameters": sampling}
        generated = (await served.client.post("/generate", json=tgi)).json()
        advice = GenerationDefaults(temperature=0.0)
        served.model.model_dir = replace(served.model.model_dir, generation=advice)
        assert greedy != neutral
        assert (await complete(served, **body))["choices"] == greedy
        assert (await complete(served, **body, temperature=None))["choices"] == greedy
        assert (await complete(served, **body, temperature=1.0))["choices"] == neutral
        assert (await served.client.post("/generate", json=tgi)).json() == generated


async def test_fields_that_slow_every_step_are_bounded() -> None:
    """Of token ids, and of those that are biased."""
    ids = [i % VOCAB_SIZE for i in range(1025)]
    bias = {str(i).zfill(4): 0.0 for i in range(1025)}
    async with serving() as served:
        await complete(served, prompt="a", stop_token_ids=ids[:1024])
        for name, value in (("stop_token_ids", ids), ("logit_bias", bias)):
            for path, field in (
                (COMPLETIONS, {name: value}),
                (GENERATE, {"parameters": {name: value}}),
            ):
                answer = str(await post(served, path, status=400, **field))
                assert name in answer
                assert "at most 1024" in answer


async def test_min_tokens_leave_a_token_that_does_not_end_the_text() -> None:
    others = [i for i in range(VOCAB_SIZE) if i != EOS]
    async with serving() as served:
        for ignore_eos, every in ((False, others), (True, [*others, EOS])):
            body = {"prompt": "a", "max_tokens": 2, "ignore_eos": ignore_eos}
            asked = body | {"stop_token_ids": every}
            refused = await post(served, COMPLETIONS, status=400, **asked, min_tokens=1)
            assert refused["error"]["param"] == "stop_token_ids"
            await complete(served, **asked)
            await complete(served, **body, stop_token_ids=others[1:], min_tokens=1)


async def test_the_model_is_listed_and_has_any_name_that_clients_need() -> None:
    async with serving() as served:
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in listed] == [(MODEL, 64)]
        for other in ("other/model", "dummy", "tgi"):
            missing = await served.client.get(f"/v1/models/{other}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )
        for whichever in ("dummy", "tgi"):
            assert (await complete(served, prompt="a", model=whichever))["model"] == MODEL


async def test_best_of_returns_the_likeliest_samples() -> None:
    """The mean log-probability of a token decides, and the others count in the usage."""
    body = {"prompt": ["def read", "json"], "max_tokens": 6, "seed": 3, "logprobs": 0}
    async with serving() as served:
        every = await complete(served, **body, n=5)
        best = await complete(served, **body, n=2, best_of=5)
        plain = await complete(served, **body | {"logprobs": None}, n=2, best_of=5)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "seed": 3}
        post = served.client.post
        chats = [
            (await post("/v1/chat/completions", json=chat | {"logprobs": True} | more)).json()
            for more in ({"n": 3}, {"best_of": 3})
        ]

    def score(choice: dict[str, Any]) -> float:
        return float(np.mean(choice["logprobs"]["token_logprobs"]))

    def score_of_chat(choice: dict[str, Any]) -> float:
        return float(np.mean([token["logprob"] for token in choice["logprobs"]["content"]]))

    expected = []
    for start in (0, 5):
        expected += sorted(every["choices"][start : start + 5], key=score, reverse=True)[:2]
    assert [one | {"index": i} for i, one in enumerate(expected)] == best["choices"]
    assert [one["text"] for one in plain["choices"]] == [one["text"] for one in expected]
    assert all(one["logprobs"] is None for one in plain["choices"])
    assert best["usage"] == every["usage"]
    likeliest = max(chats[0]["choices"], key=score_of_chat)
    assert chats[1]["choices"] == [likeliest | {"index": 0}]


async def test_special_tokens_show_if_they_are_not_skipped() -> None:
    tagged = Tokenizer.from_str(tokenizer.to_str())
    tagged.add_special_tokens(["<|tag|>"])
    model_dir = replace(fake_model_dir(max_model_len=LONG), tokenizer=tagged)
    async with chatting(tagged.encode("def<|tag|> read").ids, model_dir) as (served, _, _):
        for path in (COMPLETIONS, CHAT):
            texts = []
            for skips in (True, False):
                answer = await post(served, path, skip_special_tokens=skips)
                (choice,) = answer["choices"]
                texts.append(choice.get("text") or choice["message"]["content"])
            assert texts == ["def read", "def<|tag|> read"]


@pytest.mark.parametrize("form", FORMS)
async def test_a_suffix_makes_a_prompt_for_the_middle(form: FillInMiddle) -> None:
    """Each tag becomes its own token, and ends the middle."""
    filling = Tokenizer.from_str(tokenizer.to_str())
    names = (*form.tags, *form.ends)
    filling.add_special_tokens([*names])
    first, second, third = (filling.token_to_id(tag) for tag in form.tags)
    end = filling.token_to_id(names[-1])
    assert end is not None
    model_dir = replace(fake_model_dir(max_model_len=LONG), tokenizer=filling)
    middle = [*tokenizer.encode("path").ids, end, *tokenizer.encode("more").ids]
    async with chatting(middle, model_dir) as (served, _, prompts):
        body = {"prompt": "def read(", "suffix": "):\n"}
        (choice,) = (await complete(served, **body))["choices"]
        events = await stream(served, COMPLETIONS, **body)
        for more in ({"prompt": [5, 6]}, {"echo": True}, {"truncate_prompt_tokens": 3}):
            refused = await post(served, COMPLETIONS, status=400, **body | more)
            assert refused["error"]["param"] == "suffix"
    prefix = tokenizer.encode(f"{form.space}def read(").ids
    suffix = tokenizer.encode("):\n").ids
    assert prompts == [[first, *prefix, second, *suffix, third]] * 2
    assert (choice["text"], choice["finish_reason"]) == ("path", "stop")
    assert joined(COMPLETIONS, events)["choices"] == [choice]


ONE = {"const": 1}
GBNF = 'root ::= day ("," day)*\nday ::= "mon" | "t\\u0075e"\n'


CONSTRAINED: list[tuple[JSON, str]] = [
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"guided_choice": ["a b", 'c"\\']}, r'a b|c"\\'),
    ({"structured_outputs": {"choice": ["x", "yy"]}}, "x|yy"),
    ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    ({"grammar": GBNF}, "(mon|tue)(,(mon|tue))*"),
    ({"ebnf": GBNF}, "(mon|tue)(,(mon|tue))*"),
    ({"structured_outputs": {"grammar": GBNF}}, "(mon|tue)(,(mon|tue))*"),
    ({"guided_json": {"enum": ["a", 1]}}, '"a"|1'),
    ({"guided_json": '{"enum": ["a", 1]}'}, '"a"|1'),
    ({"json_schema": '{"enum": ["a", 1]}'}, '"a"|1'),
    ({"structured_outputs": {"json": {"enum": ["a", 1]}}}, '"a"|1'),
    ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    *(
        ({"response_format": form}, "1")
        for form in (
            {"type": "json_schema", "json_schema": {"schema": ONE}},
            {"type": "json_schema", "json_schema": {"name": "my schema", "schema": ONE}},
            {"type": "json_object", "schema": ONE},
            {"type": "json_schema", "value": {"name": "t", "schema": ONE}},
            {"type": "json_object", "value": ONE},
            {"type": "json", "value": '{"const": 1}'},
            {"type": "regex", "value": "1"},
        )
    ),
]


async def test_fields_of_other_servers_constrain_the_text() -> None:
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=400)) as served:
        for fields, pattern in CONSTRAINED:
            answer = await complete(served, prompt="a", max_tokens=300, n=3, seed=2, **fields)
            whole = [one["text"] for one in answer["choices"] if one["finish_reason"] == "stop"]
            assert whole, fields
            for text in whole:
                assert re.fullmatch(pattern, text, re.DOTALL), (fields, text)
