"""/v1/messages: the same chat as OpenAI's in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from pydantic_core import from_json

from tests.kit.chats import (
    BOTH,
    HERMES_TEXT,
    LONG,
    THINKING,
    TIME,
    TOOLS,
    TOOLS_OF,
    chatting,
    with_template,
)
from tests.kit.dialects import (
    CHAT,
    MESSAGES,
    USER,
    anthropic_types,
    joined,
    parsed,
    post,
    stream,
    without,
)
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, Served, fake_model_dir, serving, small_tokenizer

THEIR_TOOLS = TOOLS_OF[MESSAGES]


async def count(served: Served, **body: Any) -> int:
    answer = await served.client.post(f"{MESSAGES}/count_tokens", json={"messages": USER} | body)
    n_tokens: int = anthropic_types().MessageTokensCount.model_validate(answer.json()).input_tokens
    return n_tokens


@pytest.mark.parametrize("written", ["[1]", '{"utc": nope}'])
async def test_arguments_that_are_no_object_are_left_out(written: str) -> None:
    """Nor do they fail an answer if they are no JSON, though a stream has them as they are."""
    text = f'<tool_call>{{"name": "time", "arguments": {written}}}</tool_call>'
    async with chatting(text) as (served, _, _):
        answer = await post(served, MESSAGES, tools=THEIR_TOOLS)
        events = await stream(served, MESSAGES, tools=THEIR_TOOLS)
    assert answer["content"][0]["input"] == {}
    parts = [one["delta"].get("partial_json", "") for one in events if "delta" in one]
    if "nope" in written:
        with pytest.raises(ValueError, match="expected"):
            from_json("".join(parts))


async def test_the_reason_of_the_end() -> None:
    async with chatting("One two three.", fake_model_dir(max_model_len=200)) as (served, _, _):
        for body, expected in (
            ({}, ("end_turn", None)),
            ({"max_tokens": 2}, ("max_tokens", None)),
            ({"stop_sequences": ["x", " two", "two"]}, ("stop_sequence", " two")),
            ({"ignore_eos": True}, ("model_context_window_exceeded", None)),
        ):
            answer = await post(served, MESSAGES, **body)
            assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    async with chatting(HERMES_TEXT) as (served, _, _):
        answer = await post(served, MESSAGES, tools=THEIR_TOOLS)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await post(served, MESSAGES, tools=THEIR_TOOLS, tool_choice=choice)
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
        await post(served, MESSAGES, **theirs)
        await post(served, CHAT, **ours)
        assert prompts[0] == prompts[1]
        before = {"role": "assistant", "content": "It is"}
        await post(served, MESSAGES, messages=[*USER, before])
        await post(served, CHAT, messages=[*USER, before], continue_final_message=True)
        assert prompts[2] == prompts[3]
        for change, expected in (
            ({"thinking": {"type": "disabled"}}, "<think></think>"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, ""),
            ({"thinking": {"type": "adaptive", "display": "omitted"}}, ""),
            ({"output_config": {"effort": "high"}}, "high"),
            ({"tools": THEIR_TOOLS, "tool_choice": {"type": "none"}}, ""),
        ):
            await post(served, MESSAGES, **change)
            assert small_tokenizer().decode(prompts[-1]) == f"u>Weather?\na>{expected}"


async def test_the_format_of_the_text_and_thinking_that_is_left_out() -> None:
    async with chatting("<think>Hm.</think>No JSON.", with_template(THINKING)) as (served, _, _):
        config = {"format": {"type": "json_schema", "schema": TIME}}
        body: dict[str, Any] = {"output_config": config, "max_tokens": 99, "seed": 1}
        answer = await post(served, MESSAGES, **body)
        body["thinking"] = {"type": "adaptive", "display": "omitted"}
        hidden = await post(served, MESSAGES, **body)
        streamed = joined(MESSAGES, await stream(served, MESSAGES, **body))
        assert without(streamed) == without(hidden)
    thought, text = answer["content"]
    jsonschema.validate(json.loads(text["text"]), TIME)
    assert (thought["thinking"], hidden["content"][0]["thinking"]) == ("Hm.", "")
    assert thought["signature"] == hidden["content"][0]["signature"] != ""
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_counted_tokens_are_those_of_the_prompt() -> None:
    body: dict[str, Any] = {"system": "Be brief.", "tools": THEIR_TOOLS}
    body |= {"messages": [*USER, {"role": "assistant", "content": CALLS}, *USER]}
    runner = FakeRunner(VOCAB_SIZE, max_model_len=LONG)
    async with serving(
        runner, cache_bytes=2**20, model_dir=fake_model_dir(max_model_len=LONG)
    ) as served:
        counted = await count(served, **body)
        cold, warm = [await post(served, MESSAGES, **body, max_tokens=3) for _ in range(2)]
        n_long = await count(served, system="a " * LONG)
    assert counted == cold["usage"]["input_tokens"]
    usage = warm["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert n_long > LONG, "a prompt that is too long is counted too"


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
    assert joined(MESSAGES, parsed(MESSAGES, response.text))["content"] == [
        {"type": "text", "text": "Hi."}
    ]
    assert count.json()["input_tokens"] == len(prompts[0])
    assert response.headers["request-id"] == response.headers["x-request-id"]


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
        first, *_, last = parsed(MESSAGES, (await reading).text)
    assert first["message"]["usage"]["output_tokens"] == 0
    assert last["type"] == "message_stop"
