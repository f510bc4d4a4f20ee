"""What holds in every dialect: answers say the same, streams add up to them and have one end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from kvasir.server.api.http import pieces, streams
from kvasir.server.api.openai.responses.schemas import ENCRYPTED, LOGPROBS
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.async_engine import OutputStream
from tests.kit.chats import THINKING, TIME, TOOLS, TOOLS_OF, WEATHER, chatting, with_template
from tests.kit.dialects import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    GENERATE_STREAM,
    JSON,
    LEAST,
    MESSAGES,
    RESPONSES,
    joined,
    parsed,
    post,
    stream,
    without,
)
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import live, wait
from tests.kit.serving import VOCAB_SIZE, RawRequest, serving, small_tokenizer

LIMITS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
STOPS = {CHAT: "stop", MESSAGES: "stop_sequences", RESPONSES: "stop"}
TGI_FORMAT: JSON = {"type": "json_schema", "value": {"schema": WEATHER}}


def said(path: str, answer: JSON) -> tuple[str, str, list[tuple[str, Any]], bool]:
    """Return the reasoning, content and calls of an answer, and if it ended with calls."""
    if path == MESSAGES:
        parts = [
            (one["type"], one.get("text") or one.get("thinking", "")) for one in answer["content"]
        ]
        calls = [(one["name"], one["input"]) for one in answer["content"] if "input" in one]
        kinds, ends = ("thinking", "text"), answer["stop_reason"] == "tool_use"
    elif path == RESPONSES:
        output = answer["output"]
        parts = [(one["type"], one["content"][0]["text"]) for one in output if "content" in one]
        calls = [(one["name"], arguments(one["arguments"])) for one in output if "name" in one]
        has_ended = answer["status"] == output[-1]["status"] == "completed"
        kinds, ends = ("reasoning", "message"), has_ended and "name" in output[-1]
    else:
        (choice,) = answer["choices"]
        message = choice["message"]
        parts = [(key, text) for key, text in message.items() if isinstance(text, str)]
        functions = [one["function"] for one in message.get("tool_calls", [])]
        calls = [(one["name"], arguments(one["arguments"])) for one in functions]
        kinds, ends = ("reasoning_content", "content"), choice["finish_reason"] == "tool_calls"
    reasoning, content = ("".join(text for kind, text in parts if kind == one) for one in kinds)
    return reasoning, content, calls, ends


def arguments(text: str) -> Any:
    with suppress(ValueError):
        return from_json(text, allow_partial=True)
    return {}


def random_answer(rng: random.Random) -> tuple[str, tuple[str, str, list[Any]]]:
    """Return a text with parts that look alike, and its reasoning, content and calls."""
    words = ["Let me", " see.\n", "é☃", "</", "<tool", "}", "{", "a" * 30]
    reasoning = rng.choice(["", "Hm.", "Hm <b>\n so"])
    text, content, calls = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "", "", []
    for _ in range(rng.randrange(1, 4)):
        said = "".join(rng.choices(words, k=rng.randrange(4)))
        text, content = text + said, content + said
        if rng.random() < 0.5:
            calls.append(("time", {"utc": [True, rng.choice(["ab", "}", "</tool_call>", "é\n"])]}))
            call = {"name": "time", "arguments": calls[-1][1]}
            text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>\n"
    return text, (reasoning, content, calls)


async def test_an_answer_is_the_same_in_every_dialect_whole_and_streamed() -> None:
    """Wherever a limit or a stop string cuts it."""
    kinds = Counter[str]()
    for seed in range(2):
        rng = random.Random(seed)
        text, expected = random_answer(rng)
        n_tokens = len(small_tokenizer().encode(text).ids)
        async with chatting(text, with_template(THINKING)) as (served, _, prompts):
            for n in [n_tokens + 9, *rng.sample(range(1, n_tokens), min(3, n_tokens - 1))]:
                stops = [text[at : at + 2] for at in rng.sample(range(len(text)), rng.randrange(2))]
                stops = stops if n < n_tokens else []
                answers = []
                for path, limit in LIMITS.items():
                    body = {"tools": TOOLS_OF[path], limit: n, STOPS[path]: stops}
                    whole = await post(served, path, **body)
                    events = await stream(served, path, **body)
                    shown = without(whole)
                    assert shown == shown | without(joined(path, events))
                    answers.append(said(path, whole))
                assert answers == answers[:1] * 3
                assert prompts == prompts[:1] * len(prompts)
                reasoning, content, calls, has_ended = answers[0]
                kinds["whole"] += n > n_tokens
                kinds["reasoning"] += bool(reasoning)
                kinds["cut in reasoning"] += bool(reasoning) and not content and not calls
                kinds["cut after a call"] += bool(calls) and not has_ended
                kinds["ends with a call"] += has_ended
                kinds["stop string"] += bool(stops)
                if n > n_tokens:
                    assert (reasoning, calls) == (expected[0], expected[2])
                    assert content.split() == expected[1].split() or calls
                    assert "".join(content.split()) == "".join(expected[1].split())
    assert all(kinds.values()), kinds


BOTH_SCORED = {"prompt": [[3, 4, 9], [5, 6, 7]], "echo": True, "logprobs": 2, "n": 2}
SAMPLES = {"best_of": 2, "seed": 1, "do_sample": True, "top_n_tokens": 2, "max_new_tokens": 5}
ALL_DETAILS = {"details": True, "decoder_input_details": True}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["def read", "json"], "n": 2}),
        (COMPLETIONS, BOTH_SCORED | {"return_token_ids": True}),
        (COMPLETIONS, {"stop": ["a", "e"], "temperature": 0}),
        (COMPLETIONS, {"prompt": "def", "prompt_logprobs": 3}),
        (CHAT, {"n": 3}),
        (CHAT, {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}),
        (CHAT, {"stop": ["a", "e"], "temperature": 0}),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "logprobs": True, "n": 2}),
        (CHAT, {"response_format": TGI_FORMAT}),
        (CHAT, {"logprobs": True, "prompt_logprobs": 1}),
        (RESPONSES, {"include": [LOGPROBS], "top_logprobs": 2}),
        (RESPONSES, {"include": [ENCRYPTED], "metadata": {"a": "b"}, "instructions": "Be."}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": TIME}}}),
        (GENERATE, {"inputs": "read", "parameters": SAMPLES | ALL_DETAILS}),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(
    path: str, fields: JSON, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a long answer, which threads make while it is sent, is what a short one is."""
    is_free = not fields.keys() & {"tools", "response_format", "output_config"}
    most = 40 if is_free else 150  # enough for what has an end of its own
    body = fields | {LIMITS.get(path, "max_tokens"): most, "seed": 3, "ignore_eos": is_free}
    body |= {"max_tokens": 12} if path == COMPLETIONS else {}
    body = fields if path == GENERATE else body
    streams = path != GENERATE and "prompt_logprobs" not in fields
    with_usage = {"stream_options": {"include_usage": True}} if path in (COMPLETIONS, CHAT) else {}
    async with chatting() as (served, _, _):
        whole = without(await post(served, path, **body))
        if streams:
            events = await stream(served, path, **body, **with_usage)
            assert whole == whole | without(joined(path, json.loads(json.dumps(events))))
        if streams and with_usage:
            assert all("usage" not in event for event in await stream(served, path, **body))
            assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole["usage"])
            assert all(event["usage"] is None for event in events[:-1])
        if path == CHAT and "return_token_ids" in fields:
            (choice,) = whole["choices"]
            scored = choice["logprobs"]["content"]
            assert [one["token_id"] for one in scored] == choice["token_ids"]
        makers = set[str]()

        def noting(value: Any, **options: Any) -> bytes:
            makers.add(threading.current_thread().name.partition("_")[0])
            return to_json(value, **options)

        monkeypatch.setattr(pieces, "FEW", 0)
        monkeypatch.setattr(pieces, "to_json", noting)
        long = await post(served, path, **body)
        assert without(long) == whole
        if streams:
            again = await stream(served, path, **body, **with_usage)
            assert by_choice(without(again)) == by_choice(without(events))
        if path == RESPONSES:
            stored = await served.client.get(f"{path}/{long['id']}")
            assert stored.json() == long
        is_scored = re.search("logprobs|token_ids|details", json.dumps(fields))
        assert ("texts" in makers) == (is_scored is not None), "off the event loop"


def by_choice(events: list[JSON]) -> list[JSON]:
    """Return events with those of each choice together: its prompt's turn is a matter of time."""

    def index(event: JSON) -> int:
        choices: list[JSON] = event.get("choices") or []
        return choices[0]["index"] if choices else len(events)

    return sorted(events, key=index)


# The type of the last event, and what it says of the end.
ENDINGS: dict[str, dict[str, Any]] = {
    "deadline": {
        COMPLETIONS: "timeout",
        CHAT: "timeout",
        MESSAGES: "max_tokens",
        RESPONSES: "incomplete",
        GENERATE_STREAM: "length",
    },
    "drain": {
        **dict.fromkeys((COMPLETIONS, CHAT, GENERATE_STREAM), "unavailable"),
        MESSAGES: "overloaded_error",
        RESPONSES: "failed",
    },
    "failure": {
        **dict.fromkeys((COMPLETIONS, CHAT), "internal_error"),
        MESSAGES: "api_error",
        RESPONSES: "failed",
        GENERATE_STREAM: "generation",
    },
}
ENDINGS["bug"] = ENDINGS["failure"]


def reason_of_end(path: str, answer: JSON) -> Any:
    """Return why an answer has ended, or an event that is an error has come."""
    if "error_type" in answer:
        return answer["error_type"]
    if answer.get("error"):
        return answer["error"]["type"] if path != RESPONSES else answer["status"]
    if path == MESSAGES:
        return answer["stop_reason"]
    if path == RESPONSES:
        return answer["status"]
    place = answer["details"] if path == GENERATE_STREAM else answer["choices"][0]
    return place["finish_reason"]


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("path", ENDINGS["deadline"])
async def test_an_answer_that_is_ended_has_one_end(
    path: str, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its deadline it is what there is, whole too. Failures are told without their details."""
    bugs = list[Exception]()
    receive = OutputStream.receive

    async def failing(self: OutputStream) -> Any:
        outputs = await receive(self)
        for bug in bugs:
            raise bug
        return outputs

    monkeypatch.setattr(OutputStream, "receive", failing)
    for is_whole in (False, True) if end == "deadline" else (False,):
        fields: JSON = {"ignore_eos": True, "logit_bias": {"66": 100}}
        body = LEAST[path] | fields | {LIMITS.get(path, "max_tokens"): 30, "stream": not is_whole}
        url = path
        if path == GENERATE_STREAM:
            url = GENERATE if is_whole else path
            body = {"inputs": "a", "parameters": fields | {"max_new_tokens": 30, "details": True}}
        async with serving() as served:
            served.runner.hold()
            headers = {"x-request-id": "mine"}
            reading = asyncio.create_task(served.client.post(url, json=body, headers=headers))
            await served.submitted.acquire()
            served.runner.allow(4)
            await asyncio.to_thread(served.runner.wait_until_held)
            if end == "deadline":
                engine = served.model.engine
                engine.abort([one.id for one in engine.sequences], FinishReason.TIMEOUT)
            elif end == "drain":
                served.model.engine.abort_all()  # as when `drain_timeout` is over
            elif end == "bug":
                bugs.append(ZeroDivisionError("secret detail"))
            else:
                served.runner.error = RuntimeError("secret detail")
            served.runner.release()
            response = await reading
        assert response.status_code == 200
        assert "secret" not in response.text
        if end in ("failure", "bug"):
            assert "request id mine" in response.text
            assert "secret detail" in caplog.text
        if is_whole:
            answer = response.json()
        else:
            events = parsed(path, response.text)
            is_error = "error" in events[-1]
            answer = events[-1] if is_error else joined(path, events)
        assert reason_of_end(path, answer) == ENDINGS[end][path]


@pytest.mark.parametrize(
    ("path", "sign"), [(CHAT, ": keep-alive"), (MESSAGES, "event: ping"), ("/api/chat", '""}')]
)
async def test_a_stream_whose_tokens_show_nothing_is_no_silence(
    path: str, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a call that is passed on once it is complete: proxies cut silent streams off."""
    call = '<|tool_call>call:time{utc:true,note:<|"|>aaaaaaaaaaaa<|"|>}<tool_call|>'
    body = LEAST.get(path, LEAST[CHAT]) | {"stream": True, "tools": TOOLS_OF.get(path, TOOLS)}
    async with chatting(call, tool_call_format="gemma") as (served, _, _):
        quiet = await served.client.post(path, json=body)
        monkeypatch.setattr("kvasir.server.requests.async_engine._MOST_AT_ONCE", 1)
        monkeypatch.setattr(streams, "perf_counter", count(0, 10).__next__)
        response = await served.client.post(path, json=body)
    assert quiet.text.count(sign) < 2 <= response.text.count(sign)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_client_that_leaves_ends_its_request(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.server.api.http.streams.KEEP_ALIVE_SECONDS", 0.1)
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000)
    with live(runner) as served, served.http() as client:
        body = LEAST[path] | {
            "stream": True,
            "ignore_eos": True,
            LIMITS.get(path, "max_tokens"): 999,
        }
        runner.hold()
        runner.allow(3)
        with client.stream("POST", path, json=body) as response:
            begun = next(response.iter_text())
        wait(served.left)
        runner.release()
        wait(served.freed)
        if path == RESPONSES:
            first = json.loads(begun.partition("data: ")[2].partition("\n")[0])["response"]["id"]
            assert client.get(f"{path}/{first}").status_code == 404


@pytest.mark.parametrize("path", ENDINGS["deadline"])
async def test_a_stream_that_ends_before_its_first_event(path: str) -> None:
    """By a client that leaves, nothing is sent; by a shutdown, an answer with a status."""
    body = LEAST[path] | ({} if path == GENERATE_STREAM else {"stream": True})
    async with serving() as served:
        served.runner.hold()
        left = RawRequest(served.app, path, body)
        await served.submitted.acquire()
        await asyncio.to_thread(served.runner.wait_until_held)
        left.leaves.set()
        await left.task
        assert left.sent == []
        ended = RawRequest(served.app, path, body)
        ended.reads.set()
        await served.submitted.acquire()
        served.model.engine.abort_all()
        served.runner.release()
        await ended.task
        assert ended.sent[0]["status"] == 503
        assert served.model.admission.n_inside == 0


def with_text(path: str, text: str) -> JSON:
    """Return the field of a prompt."""
    if path in (CHAT, MESSAGES):
        return {"messages": [{"role": "user", "content": text}]}
    return {{COMPLETIONS: "prompt", RESPONSES: "input"}.get(path, "inputs"): text}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, GENERATE])
async def test_what_exceeds_the_context_is_refused_with_both_numbers(path: str) -> None:
    """By the code that clients know who shorten their prompts, where the dialect has one."""
    asked: list[tuple[JSON, str]] = [
        (with_text(path, "ab " * 800), r"However, the \w+ has \d{3,}"),
        (with_text(path, "ab " * 100_000), r"However, the \w+ has 300\d{3} bytes"),
    ]
    if path == COMPLETIONS:
        asked += [({"prompt": [5] * n}, str(n)) for n in (65, 5_000, 300_000)]
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=64)) as served:
        for body, number in asked:
            answer = await post(served, path, status=400, **body)
            error = answer["error"]
            message = error if path == GENERATE else error["message"]
            assert "maximum context length is 64 tokens" in message
            assert re.search(number, message)
            if path in (COMPLETIONS, CHAT, RESPONSES):
                assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_exceeds_the_context_is_cut_where_that_is_asked_for(path: str) -> None:
    """-1 leaves room for the answer."""
    long = with_text(path, "ab " * 800)
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=64)) as served:
        for keep, most in ((-1, 59), (7, 7)):
            answer = await post(
                served, path, truncate_prompt_tokens=keep, max_tokens=5, ignore_eos=True, **long
            )
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (most, 5)
