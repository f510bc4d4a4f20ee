"""Tool calls over HTTP: usable whatever the model, its tokens and the request."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.kit.chats import (
    BOTH,
    HERMES_TEXT,
    SCHEMAS,
    TIME,
    TOOLS,
    WEATHER,
    calls_of,
    chatting,
    choice_of,
    tool,
    with_template,
)
from tests.kit.dialects import CHAT, JSON, post, without
from tests.kit.serving import CHAT_TEMPLATE, small_tokenizer


async def test_a_call_that_is_cut_short_is_no_reason_to_finish() -> None:
    """Clients read arguments where the finish reason is tool_calls, so those must be complete."""
    async with chatting(HERMES_TEXT) as (served, _, _):
        for stop, n_calls, finish_reason in (
            ("Rome", 1, "stop"),
            ("}", 1, "stop"),
            ('"utc', 2, "stop"),
            ("</tool", 1, "tool_calls"),
            ("\n<", 0, "stop"),
        ):
            choice = await choice_of(served, tools=TOOLS, stop=stop)
            assert len(choice["message"].get("tool_calls", [])) == n_calls
            assert choice["finish_reason"] == finish_reason


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
async def test_a_required_call_is_one_if_the_tags_are_tokens(special: bool) -> None:
    """As in Qwen: added to the vocabulary, but not special. llguidance knows both by name alone."""
    tagged = Tokenizer.from_str(small_tokenizer().to_str())
    tagged.add_tokens(
        [
            AddedToken(tag, special=special, normalized=False)
            for tag in ("<tool_call>", "</tool_call>", "<|x|>")
        ]
    )
    ids = tagged.encode("<|x|>" * special + HERMES_TEXT).ids
    strict = [tool("weather", WEATHER, strict=True), tool("time", TIME)]
    async with chatting(ids, with_template(CHAT_TEMPLATE, tokenizer=tagged)) as (served, _, _):
        free = await choice_of(served, tools=TOOLS, logprobs=True)
        plain = await choice_of(served)
        held = await choice_of(served, tools=strict)
    async with chatting(model_dir=with_template(CHAT_TEMPLATE, tokenizer=tagged)) as (served, _, _):
        for seed in range(4):
            body = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "temperature": 2.0}
            forced = await choice_of(served, **body, max_tokens=400)
            assert forced["message"]["content"] is None
            for name, arguments in calls_of(forced):
                jsonschema.validate(arguments, SCHEMAS[name])
    assert calls_of(free) == calls_of(held) == BOTH
    assert free["message"]["content"] == "Let me see."
    assert held["message"]["content"].endswith("Let me see.")  # another for a token without text
    scored = [token["bytes"] or [] for token in free["logprobs"]["content"]]
    assert bytes(byte for part in scored for byte in part).decode() == HERMES_TEXT
    shown = re.sub("</?tool_call>", "", HERMES_TEXT) if special else HERMES_TEXT
    assert plain["message"]["content"] == shown


async def test_calls_may_be_limited_to_some_tools() -> None:
    """The model sees all of them, and wants to call both."""
    only: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "time"}}]}
    async with chatting(HERMES_TEXT) as (served, _, prompts):
        body = {"tools": TOOLS, "max_tokens": 200, "seed": 1}
        await post(served, CHAT, **body)
        for mode in ("auto", "required"):
            choice = {"type": "allowed_tools", "allowed_tools": only | {"mode": mode}}
            answer = await choice_of(served, **body, tool_choice=choice)
            assert {name for name, _ in calls_of(answer)} <= {"time"}
            assert calls_of(answer) or mode == "auto"
        answer = await choice_of(served, **body, tool_choice="any")
        assert calls_of(answer)
    assert prompts[1:] == prompts[:1] * 3


async def test_a_call_cut_by_the_limit_is_no_content() -> None:
    n_call = len(small_tokenizer().encode(HERMES_TEXT[:12]).ids)
    async with chatting(HERMES_TEXT) as (served, _, _):
        for n in range(n_call + 2, n_call + 12):
            choice = await choice_of(served, tools=TOOLS, max_tokens=n)
            assert choice["message"]["content"] == "Let me see."
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_formats_without_effect_are_accepted(tool_choice: str) -> None:
    """Schemas made from types have formats that constrain nothing."""
    login = {
        "type": "object",
        "properties": {"secret": {"type": "string", "format": "password", "maxLength": 3}},
        "required": ["secret"],
        "additionalProperties": False,
    }
    async with chatting(
        '<tool_call>\n{"name": "login", "arguments": {"secret": "abc"}}\n</tool_call>'
    ) as (served, _, _):
        body: JSON = {
            "tools": [tool("login", login, strict=True)],
            "tool_choice": tool_choice,
            "parallel_tool_calls": False,
        }
        choice = await choice_of(served, **body)
    assert calls_of(choice) == [("login", {"secret": "abc"})]


async def test_a_call_that_must_come_leaves_no_content_for_a_format() -> None:
    """instructor sends both to /v1/responses."""
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    async with chatting() as (served, _, _):
        answer = await post(served, CHAT, **body, response_format={"type": "json_object"})
        alone = await post(served, CHAT, **body)
    (choice,), (expected,) = answer["choices"], alone["choices"]
    assert without(choice) == without(expected)
    assert calls_of(choice)
