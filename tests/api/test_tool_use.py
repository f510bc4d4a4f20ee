"""Tool calls over HTTP: usable whatever the model, its tokens and the request."""

from __future__ import annotations

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.api.test_chat_completions import (
    BOTH,
    HERMES_TEXT,
    SCHEMAS,
    TIME,
    TOOLS,
    WEATHER,
    calls_of,
    chatting,
    events,
    joined,
    post,
    tool,
    with_template,
    without_ids,
)
from tests.serving import CHAT_TEMPLATE, small_tokenizer


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
            choice = (await post(served, tools=TOOLS, stop=stop))["choices"][0]
            chunks = await events(served, tools=TOOLS, stop=stop)
            assert len(choice["message"].get("tool_calls", [])) == n_calls
            assert choice["finish_reason"] == finish_reason
            assert without_ids(joined(chunks)) == without_ids(choice)


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
async def test_a_required_call_is_one_if_the_tags_are_tokens(special: bool) -> None:
    """As in Qwen: added to the vocabulary, but not special. llguidance knows both by name alone."""
    tagged = Tokenizer.from_str(small_tokenizer().to_str())
    tagged.add_tokens(
        [
            AddedToken(tag, special=special, normalized=False)
            for tag in ("<tool_call>", "</tool_call>")
        ]
    )
    ids = tagged.encode(HERMES_TEXT).ids
    strict = [tool("weather", WEATHER, strict=True), tool("time", TIME)]
    async with chatting(ids, with_template(CHAT_TEMPLATE, tokenizer=tagged)) as (served, _, _):
        free = (await post(served, tools=TOOLS))["choices"][0]
        held = (await post(served, tools=strict))["choices"][0]
    async with chatting(bundle=with_template(CHAT_TEMPLATE, tokenizer=tagged)) as (served, _, _):
        for seed in range(4):
            body = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "temperature": 2.0}
            forced = (await post(served, **body, max_tokens=400))["choices"][0]
            assert forced["message"]["content"] is None
            for name, arguments in calls_of(forced):
                jsonschema.validate(arguments, SCHEMAS[name])
    assert calls_of(free) == calls_of(held) == BOTH
    assert free["message"]["content"] == held["message"]["content"] == "Let me see."


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
        body = {
            "tools": [tool("login", login, strict=True)],
            "tool_choice": tool_choice,
            "parallel_tool_calls": False,
        }
        choice = (await post(served, **body))["choices"][0]
    assert calls_of(choice) == [("login", {"secret": "abc"})]
