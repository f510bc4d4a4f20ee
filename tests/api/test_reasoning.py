"""Reasoning over HTTP: beside the content, whole and streamed, before calls and structured text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.kit.chats import (
    BOTH,
    HERMES_TEXT,
    THINKING,
    TIME,
    TOOLS,
    calls_of,
    chatting,
    choice_of,
    with_template,
)
from tests.kit.dialects import CHAT, JSON, USER, joined, post, stream, without
from tests.kit.serving import CHAT_TEMPLATE, small_tokenizer

THOUGHT = "First\nsecond."


def both_forms(deep: bool, text: str) -> tuple[str, dict[str, Any]]:
    lead = "\n" if deep else "<think>\n"
    return f"{lead}{THOUGHT}\n</think>\n\n{text}", {"chat_template_kwargs": {"deep": deep}}


@pytest.mark.parametrize("deep", [False, True])
async def test_reasoning_is_apart_from_content_and_calls(deep: bool) -> None:
    text, body = both_forms(deep, HERMES_TEXT)
    body["tools"] = TOOLS
    async with chatting(text, with_template(THINKING)) as (served, _, _):
        answer = await post(served, CHAT, **body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await stream(served, CHAT, **body, stream_options=options)
    choice = answer["choices"][0]
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice) == BOTH
    before = text.partition("\n\nLet")[0]
    n_reasoning = len(small_tokenizer().encode(before).ids)
    details = answer["usage"]["completion_tokens_details"]
    assert abs(details["reasoning_tokens"] - n_reasoning) <= 1
    assert events[-1]["usage"] == answer["usage"]
    for usage in (event["usage"] for event in events if deep):  # from the first token on
        so_far = usage["completion_tokens_details"]["reasoning_tokens"]
        assert so_far == min(usage["completion_tokens"], details["reasoning_tokens"])


@pytest.mark.parametrize(("deep", "kind"), [(False, "text"), (True, "added"), (False, "special")])
async def test_structured_text_and_forced_calls_come_after_the_reasoning(
    deep: bool, kind: str
) -> None:
    tagged = Tokenizer.from_str(small_tokenizer().to_str())
    if kind != "text":
        tags = [AddedToken(t, special=kind == "special") for t in ("<think>", "</think>")]
        tagged.add_tokens(tags)
    text, body = both_forms(deep, "No JSON.")
    model_dir = with_template(THINKING, tokenizer=tagged)
    schema = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIME}}
    body |= {"max_tokens": 300, "seed": 1}
    async with chatting(tagged.encode(text).ids, model_dir) as (served, _, _):
        held = (await choice_of(served, **body, response_format=schema))["message"]
        regex = (await choice_of(served, **body, regex="[a-c]{3}"))["message"]
        rules = (await choice_of(served, **body, grammar='start: "x" /[0-9]/'))["message"]
        forced = await choice_of(served, **body, tools=TOOLS, tool_choice="any")
        off = {"chat_template_kwargs": {"enable_thinking": False}, "response_format": schema}
        plain = (await choice_of(served, **body | off))["message"]
    for message in (held, regex, rules, forced["message"]):
        assert message["reasoning_content"] == THOUGHT
    jsonschema.validate(json.loads(held["content"]), TIME)
    jsonschema.validate(json.loads(plain["content"]), TIME)
    assert "reasoning_content" not in plain
    assert set(regex["content"]) <= set("abc")
    assert rules["content"][0] == "x"
    assert calls_of(forced)


SHOWING_THOUGHTS = THINKING.replace(
    "{{ message.content or '' }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}",
)


@pytest.mark.parametrize("begun", [{"reasoning_content": "First"}, {"content": "<think>First"}])
async def test_a_final_message_is_continued_inside_its_reasoning(begun: dict[str, str]) -> None:
    body: JSON = {"messages": [*USER, {"role": "assistant"} | begun]}
    body["continue_final_message"] = True
    answered = {"messages": [*USER, {"role": "assistant", "content": "<think>a</think>So"}]}
    model_dir = with_template(SHOWING_THOUGHTS)
    async with chatting(" second.\n</think>\n\nNo.", model_dir) as (served, _, prompts):
        whole = (await choice_of(served, **body))["message"]
        chunks = await stream(served, CHAT, **body)
        held = (await choice_of(served, **body, regex="[a-c]{3}"))["message"]
        over = (await choice_of(served, **body | answered))["message"]
    assert small_tokenizer().decode(prompts[0]).endswith("<think>First")
    assert (whole["reasoning_content"], whole["content"]) == (" second.", "No.")
    assert without(joined(CHAT, chunks)["choices"][0]["message"]) == whole
    assert held["reasoning_content"] == " second."
    assert set(held["content"]) <= set("abc")
    assert over["content"].startswith(" second.")


async def test_the_effort_reaches_the_template() -> None:
    async with chatting("Yes.", with_template(THINKING)) as (served, _, prompts):
        for body in (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        ):
            message = (await choice_of(served, **body))["message"]
            assert message["content"] == "Yes."
        assert [small_tokenizer().decode(ids).partition("a>")[2] for ids in prompts] == [
            "high",
            "none<think></think>",
            "none",
        ]
    async with chatting("<think>a</think>b", with_template(CHAT_TEMPLATE)) as (served, _, _):
        message = (await choice_of(served, reasoning_effort="low"))["message"]
        assert message["content"] == "<think>a</think>b", "the template names no reasoning"
    async with chatting(
        "<think>a</think>b", with_template(CHAT_TEMPLATE), reasoning_format="think"
    ) as (served, _, _):
        message = (await choice_of(served))["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "b")


async def test_keys_that_clients_add_are_ignored() -> None:
    """As litellm sends back a call's answer, and Anthropic's clients mark texts for a cache."""
    function = {"name": "time", "arguments": {"utc": True}, "parsed_arguments": 1}
    call = {"id": "c", "type": "function", "function": function, "index": 0, "caller": None}
    extra: JSON = {
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [],
        "id": "x",
    }
    cached = {"cache_control": {"type": "ephemeral"}}
    told = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"} | cached]},
        {"role": "assistant", "content": None, "tool_calls": [call]} | extra,
        {"role": "tool", "content": "12:00", "tool_call_id": "c"} | cached,
    ]
    plain_call = {"function": {"name": "time", "arguments": '{"utc": true}'}}
    plain = [
        *USER,
        {"role": "assistant", "tool_calls": [plain_call]},
        {"role": "tool", "content": "12:00"},
    ]
    async with chatting("Noon.") as (served, _, prompts):
        await post(served, CHAT, messages=told)
        await post(served, CHAT, messages=plain)
    assert prompts[0] == prompts[1]
