"""/v1/chat/completions: the prompt, every form of the answer, and tool calls."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from kvasir.server.errors import StartupError
from kvasir.server.process.app import create_app
from kvasir.server.settings import load_settings
from tests.kit.chat_templates import LLAMA_2, LLAMA_3, by_transformers
from tests.kit.chats import (
    BOTH,
    HERMES_TEXT,
    LLAMA_CALLS,
    LONG,
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
from tests.kit.dialects import CHAT, JSON, USER, joined, post, stream, without
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import (
    CHAT_TEMPLATE,
    EOS,
    MODEL,
    VOCAB_SIZE,
    beginning_with_end_of_text,
    fake_model_dir,
    serving,
    small_tokenizer,
)
from tests.text.test_detokenizer import PIECES

tokenizer = small_tokenizer()
LLAMA_TEXT = (
    '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; '
    '{"name": "time", "parameters": {"utc": true}}'
)


# What reaches the model


def conversation(seed: int) -> list[dict[str, Any]]:
    """Return random messages as clients send them: arguments are JSON in a string."""
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": "Be <kind> & 'brief'."})
    for _ in range(rng.randint(1, 3)):
        content = rng.choice(["  hi\n", "é?", "<|im_end|>", "a" * 50])
        messages.append({"role": "user", "content": content, "name": "me"})
        if rng.random() < 0.5:
            arguments = json.dumps({"utc": rng.random() < 0.5, "é": [1, None]})
            function = {"name": "time", "arguments": arguments}
            calls = [{"id": "c", "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "content": "12:00", "tool_call_id": "c"})
        messages.append({"role": "assistant", "content": rng.choice(["yes ", "\n\nno"])})
    return messages[: -1 if rng.random() < 0.7 else None]


def with_mappings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, LLAMA_3, LLAMA_CALLS], ids=["hermes", "llama 3", "llama calls"]
)
async def test_the_model_gets_what_transformers_renders(template: str) -> None:
    async with chatting(model_dir=with_template(template)) as (served, _, prompts):
        for seed in range(6):
            messages = conversation(seed)
            tools = TOOLS if seed % 2 else None
            await post(served, CHAT, messages=messages, tools=tools, max_tokens=1)
            text = by_transformers(
                template, with_mappings(messages), tools=tools, add_generation_prompt=True
            )
            assert prompts[-1] == tokenizer.encode(text, add_special_tokens=False).ids


SHOWING_CALLS = """\
{% for m in messages %}
{{ m.tool_calls[0].function.arguments if m.tool_calls else m.content }}|
{%- endfor %}"""


async def test_the_event_loop_does_not_wait_for_a_template() -> None:
    async with chatting("Hi.") as (served, _, _):
        assert served.model.chat is not None
        render = served.model.chat._template.render
        loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def late(*messages: Any, **options: Any) -> str:
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(TIMEOUT)
            return render(*messages, **options)

        served.model.chat._template.render = late  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(post(served, CHAT))
        await begun.wait()
        go.set()
        assert (await waiting)["choices"][0]["message"]["content"] == "Hi."


async def test_badly_written_calls_are_shown_as_they_are() -> None:
    """The model wrote them, and should see what was wrong."""
    answer = {"role": "tool", "content": "no JSON", "tool_call_id": "c"}
    async with chatting(model_dir=with_template(SHOWING_CALLS)) as (served, _, prompts):
        for bad in ('{"city": Rome}', '{"city": "R', "[1]", "[" * 500, '"\\ud800"', '{"a": NaN}'):
            function = {"name": "f", "arguments": bad}
            called = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
            await post(served, CHAT, messages=[called, answer], max_tokens=1)
            assert tokenizer.decode(prompts[-1]) == f"{bad}|no JSON|"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_3, LLAMA_2])
async def test_a_message_can_be_continued(template: str) -> None:
    contents: dict[str, Any] = {text: text for text in ("Once upon", " Once ")}
    contents["Once "] = [{"type": "text", "text": "Once "}]
    async with chatting(model_dir=with_template(template)) as (served, _, prompts):
        for text, content in contents.items():
            body: JSON = {"messages": [*USER, {"role": "assistant", "content": content}]}
            flat = [*USER, {"role": "assistant", "content": text}]
            for ours, theirs in (
                ({"continue_final_message": True}, {"continue_final_message": True}),
                ({"add_generation_prompt": False}, {}),
            ):
                await post(served, CHAT, **body, **ours, max_tokens=1)
                expected = by_transformers(template, flat, **theirs)
                assert prompts[-1] == tokenizer.encode(expected, add_special_tokens=False).ids


PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}|{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS_ONLY, "system:s|user:ab|"),  # reads only parts: texts become parts
        (EITHER, "s|ab|"),  # reads both: content stays as it is
        (TEXT_ONLY, "system:s|user:a\nb|"),  # reads only texts: parts become a text
        (TEXT_ONLY + "{# 'developer' #}", "developer:s|user:a\nb|"),
    ],
)
async def test_content_comes_in_the_form_that_the_template_reads(
    template: str, expected: str
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    async with chatting(model_dir=with_template(template)) as (served, _, prompts):
        await post(served, CHAT, messages=messages, max_tokens=1)
        assert tokenizer.decode(prompts[-1]) == expected


async def test_variables_reach_the_template_and_long_prompts_are_cut() -> None:
    template = "{{ mood }}{{ messages[0].content }}{{ self_ }}"
    long = "x" * 5000
    async with chatting(model_dir=with_template(template)) as (served, _, prompts):
        variables = {"mood": "gay", "self": 1, "messages_": 2}
        await post(served, CHAT, max_tokens=1, chat_template_kwargs=variables)
        assert tokenizer.decode(prompts[-1]) == "gayWeather?"
        cut = [{"role": "user", "content": long}]
        answer = await post(served, CHAT, max_tokens=1, messages=cut, truncate_prompt_tokens=3)
        assert prompts[-1] == tokenizer.encode(long).ids[-3:]
        assert answer["usage"]["prompt_tokens"] == 3


async def test_the_template_alone_writes_special_tokens() -> None:
    """The tokenizer's own BOS would be a second one."""
    template = "{{ bos_token }}{{ messages[0].content }}"
    model_dir = with_template(template, tokenizer=beginning_with_end_of_text())
    model_dir = replace(model_dir, special_tokens={"bos_token": "<|endoftext|>"})
    async with chatting(model_dir=model_dir) as (served, _, prompts):
        await post(served, CHAT, max_tokens=1)
        await post(served, CHAT, max_tokens=1, add_special_tokens=True)
    ids = tokenizer.encode("Weather?").ids
    assert prompts == [[EOS, *ids], [EOS, EOS, *ids]]


# The answer


@pytest.mark.parametrize("continues", [False, True])
async def test_an_answer_begins_a_text(continues: bool) -> None:
    """As decoders of SentencePiece have it: without the space before its first word."""
    model_dir = replace(fake_model_dir(max_model_len=LONG), tokenizer=PIECES)
    ids = PIECES.encode("a bad bed").ids
    messages = [*USER, {"role": "assistant", "content": "abed"}] if continues else USER
    body: JSON = {"messages": messages, "continue_final_message": continues}
    expected = " a bad bed" if continues else PIECES.decode(ids)
    async with chatting(ids, model_dir=model_dir) as (served, _, _):
        answer = await post(served, CHAT, **body)
        streamed = await stream(served, CHAT, **body)
    assert answer["choices"][0]["message"]["content"] == expected
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in streamed]
    assert "".join(deltas) == expected


async def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    text = "aé漢🙂 json"
    async with chatting(text) as (served, _, _):
        choice = await choice_of(served, logprobs=True, top_logprobs=2)
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"] or []).decode() == text
    assert [entry["token"] for entry in entries] == [
        tokenizer.decode([i], skip_special_tokens=False) for i in [*tokenizer.encode(text).ids, EOS]
    ]
    assert entries[-1]["bytes"] is None
    for entry in entries:
        first, _second = entry["top_logprobs"]
        assert entry["logprob"] == first["logprob"]


@pytest.mark.parametrize("budget", [None, 45])
async def test_an_answer_may_fill_the_context_or_the_memory(budget: int | None) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=40, budget_tokens=budget)
    async with serving(runner) as served:
        answer = await post(
            served, CHAT, messages=[{"role": "user", "content": "abcdef"}], ignore_eos=True
        )
    usage = answer["usage"]
    if budget is None:
        assert usage["total_tokens"] == 40
    else:
        assert runner.kv.reservation(usage["prompt_tokens"], usage["completion_tokens"]) == budget
        assert usage["total_tokens"] < 40
    assert answer["choices"][0]["finish_reason"] == "length"


# Calls of functions


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [(CHAT_TEMPLATE, HERMES_TEXT, "Let me see."), (LLAMA_CALLS, LLAMA_TEXT, None)],
    ids=["hermes", "llama"],
)
async def test_calls_are_found_whole_and_streamed(
    template: str, text: str, content: str | None
) -> None:
    async with chatting(text, with_template(template)) as (served, client, _):
        choice = await choice_of(served, tools=TOOLS)
        assert (calls_of(choice), choice["finish_reason"]) == (BOTH, "tool_calls")
        assert choice["message"]["content"] == content
        chunks = await stream(served, CHAT, tools=TOOLS)
        assert without(joined(CHAT, chunks)["choices"]) == [without(choice)]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        n_pieces = sum(len(delta.get("tool_calls", ())) for delta in deltas)
        assert n_pieces > 10, "arguments come as they are made"
        async with client.chat.completions.stream(
            model=MODEL, messages=USER, tools=TOOLS
        ) as reading:
            message = (await reading.get_final_completion()).choices[0].message
        assert [
            (c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []
        ] == BOTH
        served.runner.hold()
        served.runner.allow(len(tokenizer.encode(text).ids) - 1)  # not enough to end the text
        one = await choice_of(served, tools=TOOLS, parallel_tool_calls=False)
        served.runner.release()
        assert (calls_of(one), one["finish_reason"]) == (BOTH[:1], "tool_calls")
        chunks = await stream(served, CHAT, tools=TOOLS, parallel_tool_calls=False)
        assert without(joined(CHAT, chunks)["choices"]) == [without(one)]
        short = await choice_of(served, tools=TOOLS, max_tokens=50)
        assert short["finish_reason"] == "length"
        unused: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
        for body in unused:
            plain = await choice_of(served, **body)
            assert (plain["message"]["content"], plain["finish_reason"]) == (text, "stop")
        assert served.runner.kv.reserved_tokens == 0


async def test_tools_that_may_not_be_called_are_not_shown_to_the_model() -> None:
    async with chatting() as (served, _, prompts):
        for body in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
            await post(served, CHAT, max_tokens=1, **body)
    assert prompts[0] != prompts[1] == prompts[2]


async def test_the_format_can_be_set() -> None:
    """What has to be a call is one in any format; a function that is strict needs a known one."""
    strict = [tool("time", TIME, strict=True)]
    found = {"hermes": 2, "llama": 0, "none": 0, "auto": 0}  # the template writes no calls at all
    for setting, n_calls in found.items():
        template = with_template(TEXT_ONLY)
        async with chatting(HERMES_TEXT, template, tool_call_format=setting) as (served, _, _):
            choice = await choice_of(served, tools=TOOLS)
            assert len(calls_of(choice)) == n_calls, setting
            assert calls_of(await choice_of(served, tools=TOOLS, tool_choice="required"))
            if setting == "auto":
                refused = await post(served, CHAT, status=400, tools=strict)
                assert refused["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, LLAMA_CALLS, TEXT_ONLY], ids=["hermes", "llama", "none"]
)
async def test_a_required_call_is_valid_whatever_the_model(template: str) -> None:
    named = {"function": {"name": "time"}}  # as TGI's clients do; OpenAI's add the type
    async with chatting(model_dir=with_template(template)) as (served, _, _):
        for seed in range(2):
            body = {"tools": TOOLS, "seed": seed, "temperature": 2.0, "max_tokens": 400}
            several = await choice_of(served, **body, tool_choice="required")
            one = await choice_of(served, **body, tool_choice="required", parallel_tool_calls=False)
            time = await choice_of(served, **body, tool_choice=named)
            assert [name for name, _ in calls_of(time)] == ["time"]
            assert len(calls_of(one)) == 1
            for choice in (several, one, time):
                assert choice["message"]["content"] is None
                assert choice["finish_reason"] == "tool_calls"
                for name, arguments in calls_of(choice):
                    jsonschema.validate(arguments, SCHEMAS[name])


async def test_strict_functions_are_called_as_their_schema_says_or_not_at_all() -> None:
    """The model wants a city that the schema forbids, and gets another; text stays free."""
    wrong = HERMES_TEXT.replace("Rome", "Pisa")
    strict = [tool("weather", WEATHER, strict=True), tool("time", TIME)]
    async with chatting(wrong) as (served, _, _):
        loose = await choice_of(served, tools=TOOLS, max_tokens=300, seed=1)
        held = await choice_of(served, tools=strict, max_tokens=300, seed=1)
    assert calls_of(loose)[0] == ("weather", {"city": "Pisa", "days": 2})
    assert held["message"]["content"] == "Let me see."
    name, arguments = calls_of(held)[0]
    jsonschema.validate(arguments, SCHEMAS[name])
    async with chatting("Just text. {", with_template(LLAMA_CALLS)) as (served, _, _):
        free = await choice_of(served, tools=strict)
    assert free["message"]["content"] == "Just text. {"


@pytest.mark.parametrize(
    ("template", "calls"),
    [(CHAT_TEMPLATE, HERMES_TEXT.removeprefix("Let me see.\n")), (LLAMA_CALLS, LLAMA_TEXT)],
    ids=["hermes", "llama"],
)
async def test_an_answer_in_json_leaves_room_for_calls(template: str, calls: str) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIME}}
    body = {"tools": TOOLS, "response_format": response_format}
    async with chatting('{"utc": true}', with_template(template)) as (served, _, _):
        said = await choice_of(served, **body)
    async with chatting(calls, with_template(template)) as (served, _, _):
        called = await choice_of(served, **body)
    async with chatting("Neither.", with_template(template)) as (served, _, _):
        forced = await choice_of(served, **body, parallel_tool_calls=False)
    assert (said["message"]["content"], said["finish_reason"]) == ('{"utc": true}', "stop")
    assert (called["message"]["content"], called["finish_reason"]) == (None, "tool_calls")
    assert (calls_of(said), calls_of(called)) == ([], BOTH)
    if not calls_of(forced):
        jsonschema.validate(json.loads(forced["message"]["content"]), TIME)


# Refusals


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must"),
        (None, "chat_template.jinja"),
        (
            "{{ 'x' * (10 ** 9 if messages[0].content == 'Weather?' else 1) }}",
            "cannot render this: it takes more than",
        ),
    ],
)
async def test_a_template_that_refuses_or_is_missing_is_a_400(
    template: str | None, message: str
) -> None:
    async with chatting(model_dir=with_template(template)) as (served, _, _):
        assert message in (await post(served, CHAT, status=400))["error"]["message"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages", "is not valid"),
        ("{{ 'x' * 10 ** 9 }}", "cannot render this: it takes more than"),
    ],
)
def test_a_template_that_is_none_or_has_no_end_ends_the_start(template: str, message: str) -> None:
    expected = rf"chat_template\.jinja: the chat template {message}.*; mend it, and export"
    with pytest.raises(StartupError, match=expected):
        create_app(load_settings(model=MODEL), with_template(template))
