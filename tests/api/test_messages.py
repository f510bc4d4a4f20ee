"""/v1/messages: the same chat as OpenAI's in Anthropic's form, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

from kvasir.server.api.anthropic import answers
from kvasir.server.engine.sequence import FinishReason
from tests.api.test_chat_completions import (
    BOTH,
    HERMES_TEXT,
    LONG,
    TIME,
    TOOLS,
    chatting,
    with_template,
)
from tests.api.test_chat_completions import post as post_chat
from tests.api.test_reasoning import THINKING
from tests.fake_runner import FakeRunner
from tests.live import live, wait
from tests.serving import VOCAB_SIZE, Served, fake_bundle, serving, small_tokenizer

USER: Any = [{"role": "user", "content": "Weather?"}]
THEIR_TOOLS = [
    {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]}
    for one in TOOLS
]
ANY_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PNG = {"type": "base64", "media_type": "image/png", "data": "aaaa"}


async def post(served: Served, path: str = "", **body: Any) -> dict[str, Any]:
    body = {"messages": USER} | ({} if path else {"max_tokens": 1000}) | body
    response = await served.client.post(f"/v1/messages{path}", json=body)
    assert response.status_code == 200, response.text
    (MessageTokensCount if path else Message).model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names are their types."""
    events = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        found = re.fullmatch(r"event: (\w+)\ndata: (.+)", one)
        assert found is not None, one
        answers.MessageEvent.model_validate({"data": found[2]})
        events.append(json.loads(found[2]))
        assert events[-1]["type"] == found[1]
    ends = [one for one in events if one["type"] in ("message_stop", "error")]
    assert ends == events[-1:], "there is one end"
    return events


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": USER, "max_tokens": 1000, "stream": True} | body
    response = await served.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream adds up to, as Anthropic's package adds it up."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    n_open = 0  # blocks do not overlap
    for event in events:
        n_open += (event["type"] == "content_block_start") - (event["type"] == "content_block_stop")
        assert n_open in (0, 1)
        if event["type"] == "content_block_delta":
            assert n_open == 1
        parsed = ANY_EVENT.validate_python(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    message: dict[str, Any] = json.loads(snapshot.to_json(exclude_unset=True))
    del message["stop_details"]  # which the package adds
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {"id": None, "content": content}


async def test_a_stream_adds_up_to_the_whole_wherever_it_is_cut() -> None:
    rng = random.Random(5)
    call = '<tool_call>\n{"name": "time", "arguments": {"utc": [true, "ab"]}}\n</tool_call>'
    seen = set()
    for _ in range(5):
        parts = rng.choices(["Let me", " see.\n", call, "x", "</", "<tool", "}"], k=5)
        text = rng.choice(["", "<think>\nHm.\n</think>\n\n"]) + "".join(parts)
        n_tokens = len(small_tokenizer().encode(text).ids)
        async with chatting(text, with_template(THINKING)) as (served, _, _):
            for n in [*rng.sample(range(1, n_tokens), 3), n_tokens + 9]:
                stop = [text[at : at + 2] for at in rng.sample(range(len(text)), rng.randrange(2))]
                body: dict[str, Any] = {
                    "tools": THEIR_TOOLS,
                    "max_tokens": n,
                    "stop_sequences": stop,
                }
                whole = await post(served, **body)
                assert without_ids(joined(await stream(served, **body))) == without_ids(whole)
                seen |= {block["type"] for block in whole["content"]} | {whole["stop_reason"]}
                kinds = [block["type"] for block in whole["content"]]
                assert "thinking" not in kinds[1:], "it comes first"
    assert {"text", "thinking", "tool_use", "stop_sequence", "max_tokens"} <= seen


async def test_arguments_that_are_no_json_do_not_fail_the_answer() -> None:
    text = '<tool_call>{"name": "time", "arguments": {"utc": nope}}</tool_call>'
    async with chatting(text) as (served, _, _):
        answer = await post(served, tools=THEIR_TOOLS)
        parts = [one["delta"] for one in await stream(served, tools=THEIR_TOOLS) if "delta" in one]
    assert answer["content"][0]["input"] == {}
    written = "".join(part.get("partial_json", "") for part in parts)
    with pytest.raises(ValueError, match="expected"):
        from_json(written)


async def test_the_reason_of_the_end() -> None:
    async with chatting("One two three.", fake_bundle(max_model_len=200)) as (served, _, _):
        for body, expected in (
            ({}, ("end_turn", None)),
            ({"max_tokens": 2}, ("max_tokens", None)),
            ({"stop_sequences": ["x", " two", "two"]}, ("stop_sequence", " two")),
            ({"ignore_eos": True}, ("model_context_window_exceeded", None)),
        ):
            answer = await post(served, **body)
            assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    async with chatting(HERMES_TEXT) as (served, _, _):
        answer = await post(served, tools=THEIR_TOOLS)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await post(served, tools=THEIR_TOOLS, tool_choice=choice)
    assert answer["stop_reason"] == one["stop_reason"] == "tool_use"
    assert [(b["name"], b["input"]) for b in answer["content"][1:]] == BOTH
    assert len(one["content"]) == 2


CALLS: Any = [
    {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {"utc": True}},
    {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}, "caller": None},
]
MARK = {"cache_control": {"type": "ephemeral"}}


async def test_a_conversation_makes_the_prompt_that_openais_makes() -> None:
    """A tool round trip as Claude Code sends it, and the same for /v1/chat/completions."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "abc"}
    results: Any = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"} | MARK,
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}
        | {"content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}]},
    ]
    theirs: dict[str, Any] = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "Be brief."} | MARK,
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Time?"} | MARK]},
            {"role": "user", "content": "Now?"},
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *CALLS]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
        ],
        "tools": [one | MARK | {"type": "custom"} for one in THEIR_TOOLS],
        "metadata": {"user_id": "me"},
    }
    calls = [
        {"id": one["id"], "function": {"name": one["name"], "arguments": one["input"]}}
        for one in CALLS
    ]
    ours: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Time?\nNow?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls}
            | {"reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no\ncity"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": TOOLS,
    }
    shown = "{{ message.reasoning_content }}{{ message.tool_call_id }}{{ message.content"
    template = THINKING.replace("{{ message.content", shown)
    async with chatting("Noon.", with_template(template)) as (served, _, prompts):
        await post(served, **theirs)
        await post_chat(served, **ours)
        assert prompts[0] == prompts[1]
        before = {"role": "assistant", "content": "It is"}
        await post(served, messages=[*USER, before])
        await post_chat(served, messages=[*USER, before], continue_final_message=True)
        assert prompts[2] == prompts[3]
        for change, expected in (
            ({"thinking": {"type": "disabled"}}, "<think></think>"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, ""),
            ({"thinking": {"type": "adaptive", "display": "omitted"}}, ""),
            ({"output_config": {"effort": "high"}}, "high"),
            ({"tools": THEIR_TOOLS, "tool_choice": {"type": "none"}}, ""),
        ):
            await post(served, **change)
            assert small_tokenizer().decode(prompts[-1]) == f"u>Weather?\na>{expected}"


async def test_the_format_of_the_text_and_thinking_that_is_left_out() -> None:
    async with chatting("<think>Hm.</think>No JSON.", with_template(THINKING)) as (served, _, _):
        config = {"format": {"type": "json_schema", "schema": TIME}}
        body: dict[str, Any] = {"output_config": config, "max_tokens": 99, "seed": 1}
        answer = await post(served, **body)
        body["thinking"] = {"type": "adaptive", "display": "omitted"}
        hidden = await post(served, **body)
        assert without_ids(joined(await stream(served, **body))) == without_ids(hidden)
    thought, text = answer["content"]
    jsonschema.validate(json.loads(text["text"]), TIME)
    assert (thought["thinking"], hidden["content"][0]["thinking"]) == ("Hm.", "")
    assert thought["signature"] == hidden["content"][0]["signature"] != ""
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_counted_tokens_are_those_of_the_prompt() -> None:
    body: dict[str, Any] = {"system": "Be brief.", "tools": THEIR_TOOLS}
    body |= {"messages": [*USER, {"role": "assistant", "content": CALLS}, *USER]}
    runner = FakeRunner(VOCAB_SIZE, max_model_len=LONG)
    async with serving(runner, cache_bytes=2**20, bundle=fake_bundle(max_model_len=LONG)) as served:
        counted = await post(served, "/count_tokens", **body)
        cold, warm = [await post(served, **body, max_tokens=3) for _ in range(2)]
        n_long = await post(served, "/count_tokens", system="a " * LONG)
    assert counted["input_tokens"] == cold["usage"]["input_tokens"]
    usage = warm["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert n_long["input_tokens"] > LONG, "a prompt that is too long is counted too"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server"),
        ({"messages": [{"role": "user", "content": CALLS}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": CALLS}]}, "continue"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"system": "a " * LONG}, "prompt is too long"),
    ],
)
async def test_what_is_not_served_is_named(change: dict[str, Any], named: str) -> None:
    async with chatting("x") as (served, _, _):
        body = {"messages": USER, "max_tokens": 9, "stream": True} | change
        response = await served.client.post("/v1/messages", json=body)
    assert response.status_code == 400
    body = response.json()
    answers.AnthropicError.model_validate(body)
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


async def test_claude_codes_additions_are_accepted() -> None:
    late = {"role": "system", "content": "Agent types: one."}
    body = {
        "model": "fake-model",
        "messages": [*USER, late],
        "system": [{"type": "text", "text": "You are an agent."} | MARK],
        "tools": THEIR_TOOLS,
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "right"}
    async with chatting("Hi.", api_key="right") as (served, _, prompts):
        served.client.headers.update(headers)
        response = await served.client.post(
            "/v1/messages?beta=true", json=body | {"max_tokens": 32000, "stream": True}
        )
        count = await served.client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert joined(events_of(response.text))["content"] == [{"type": "text", "text": "Hi."}]
    assert count.json()["input_tokens"] == len(prompts[0])
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_paths_without_a_route_answer_in_anthropics_form() -> None:
    async with serving() as served:
        for method, path, status, kind in (
            ("POST", "/v1/messages/batches", 404, "not_found_error"),
            ("GET", "/v1/messages", 405, "invalid_request_error"),
        ):
            response = await served.client.request(method, path)
            error = answers.AnthropicError.model_validate(response.json()).error
            assert (response.status_code, error.type) == (status, kind)
        other = await served.client.get("/v1/messagesx")
    assert other.json()["error"]["code"] == "not_found"


async def test_the_beginning_of_a_stream_does_not_depend_on_the_load() -> None:
    """Four tokens come before the first event is written."""
    async with serving() as served:
        served.runner.hold()
        body = {"messages": USER, "max_tokens": 6, "ignore_eos": True, "stream": True}
        reading = asyncio.create_task(served.client.post("/v1/messages", json=body))
        await served.submitted.acquire()
        served.runner.allow(4)
        served.runner.wait_until_held()  # the event loop stands still meanwhile
        served.runner.release()
        first, *_, last = events_of((await reading).text)
    assert first["message"]["usage"]["output_tokens"] == 0
    assert last["type"] == "message_stop"


@pytest.mark.parametrize("end", ["deadline", "drain", "failure"])
async def test_a_stream_that_is_ended_has_one_end(end: str) -> None:
    async with serving() as served:
        served.runner.hold()
        engine = served.service.engine
        body = {"messages": USER, "max_tokens": 30, "ignore_eos": True, "stream": True}
        reading = asyncio.create_task(served.client.post("/v1/messages", json=body))
        await served.submitted.acquire()
        served.runner.allow(4)
        await asyncio.to_thread(served.runner.wait_until_held)
        if end == "deadline":
            engine.abort([one.id for one in engine.sequences], FinishReason.TIMEOUT)
        elif end == "drain":
            engine.abort_all()  # as when `drain_timeout` is over
        else:
            served.runner.error = RuntimeError("secret detail")
        served.runner.release()
        events = events_of((await reading).text)
    if end == "deadline":
        assert joined(events)["stop_reason"] == "max_tokens"
    else:
        kind = {"drain": "overloaded_error", "failure": "api_error"}[end]
        assert events[-1]["error"]["type"] == kind
        assert "secret" not in str(events)


def test_a_client_that_leaves_ends_its_request() -> None:
    with live(FakeRunner(VOCAB_SIZE, max_model_len=4000)) as served:
        body = {"messages": USER, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        connection = served.post_raw("/v1/messages", prompt=None, **body)
        wait(served.submitted)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
        wait(served.left)
        wait(served.freed)
