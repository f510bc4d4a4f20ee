"""Ollama's routes: the same answers as OpenAI's, in forms that Ollama's clients read."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from kvasir.server.api.ollama.routes import _openai_messages
from kvasir.server.api.ollama.schemas import OllamaChat, OllamaMessage, OllamaText
from tests.kit.chats import DAYS, HERMES_TEXT, THINKING, TOOLS, chatting, closed, with_template
from tests.kit.dialects import CHAT, COMPLETIONS, JSON, post
from tests.kit.serving import Served, serving, small_tokenizer

USER: Any = [{"role": "user", "content": "Weather?"}]
TEXT = f"<think>\nHm.\n</think>\n\n{HERMES_TEXT}"
WRONG: Any = {"type": "strin"}
CHAT_ROUTE, TEXT_ROUTE = "/api/chat", "/api/generate"
TYPES: dict[str, TypeAdapter[Any]] = {
    CHAT_ROUTE: TypeAdapter(OllamaChat),
    TEXT_ROUTE: TypeAdapter(OllamaText),
}
OF_TIME = {"created_at", "total_duration", "load_duration", "id"}
OF_TIME |= {"prompt_eval_duration", "eval_duration"}


def timeless(value: Any) -> Any:
    """Return an answer without times and ids."""
    if isinstance(value, dict):
        return {k: timeless(one) for k, one in value.items() if k not in OF_TIME}
    return [timeless(one) for one in value] if isinstance(value, list) else value


async def ask(served: Served, path: str, **body: Any) -> JSON:
    """Return the whole answer, which its stream adds up to."""
    whole = await served.client.post(path, json=body | {"stream": False})
    streamed = await served.client.post(path, json=body)
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    assert streamed.headers["content-type"] == "application/x-ndjson"
    answer: JSON = whole.json()
    TYPES[path].validate_json(whole.content)
    *parts, end = [json.loads(line) for line in streamed.text.splitlines()]
    for part in parts:
        assert part["done"] is False
        said, added = (one.get("message", one) for one in (end, part))
        for name in ("content", "response", "thinking", "tool_calls"):
            if name in added:
                said[name] = said[name] + added[name] if name in said else added[name]
        if "logprobs" in part:
            end["logprobs"] = end.get("logprobs", []) + part["logprobs"]
    message = end.get("message", end)  # the parts come before what the end has
    assert message.keys() == answer.get("message", answer).keys()
    assert timeless(end) == timeless(answer)
    return answer


async def test_a_chat_says_the_same_as_in_openais_dialect() -> None:
    """Wherever a limit cuts it: its reasoning, content, calls and log-probabilities."""
    n_tokens = len(small_tokenizer().encode(TEXT).ids)
    n_calls = 0
    async with chatting(TEXT, with_template(THINKING)) as (served, _, prompts):
        for n in (3, 28, n_tokens // 2, n_tokens - 9, n_tokens + 5):
            options = {"num_predict": n, "temperature": 0, "num_ctx": 4096}
            scored = {"logprobs": True, "top_logprobs": 2}
            mine = await ask(
                served, CHAT_ROUTE, messages=USER, tools=TOOLS, options=options, **scored
            )
            other = await post(
                served, CHAT, messages=USER, tools=TOOLS, max_tokens=n, temperature=0, **scored
            )
            (choice,), message = other["choices"], mine["message"]
            theirs = choice["message"]
            assert message["content"] == (theirs["content"] or "")
            assert message.get("thinking") == theirs.get("reasoning_content")
            calls = [one["function"] for one in message.get("tool_calls", [])]
            called = [one["function"] for one in theirs.get("tool_calls", [])]
            is_cut = choice["finish_reason"] == "length"  # and with it perhaps the last call
            assert len(called) - is_cut <= len(calls) <= len(called)
            for one, its in zip(calls, called, strict=False):
                assert (one["name"], one["arguments"]) == (
                    its["name"],
                    json.loads(its["arguments"]),
                )
            n_calls += 0 if is_cut else len(calls)
            assert mine["logprobs"] == choice["logprobs"]["content"]
            ended = "length" if choice["finish_reason"] == "length" else "stop"
            assert mine["done_reason"] == ended
            usage = other["usage"]
            assert mine["eval_count"] == usage["completion_tokens"]
            assert mine["prompt_eval_count"] == usage["prompt_tokens"]
            assert mine["total_duration"] >= mine["eval_duration"] > 0
    assert n_calls == 2
    assert prompts == prompts[:1] * len(prompts)


def test_results_of_tools_find_their_calls() -> None:
    """By the function's name, in any order; what was never answered gets no later result."""

    def calls(*names: str) -> dict[str, Any]:
        called = [{"function": {"name": name, "arguments": {}}} for name in names]
        return {"role": "assistant", "content": "", "tool_calls": called}

    def results(*names: str) -> list[dict[str, Any]]:
        return [{"role": "tool", "content": name, "tool_name": name} for name in names]

    turns = [calls("f", "g"), *results("g", "f"), calls("h"), *USER, calls("k"), *results("k")]
    told = _openai_messages([OllamaMessage.model_validate(turn) for turn in turns])
    ids = {one["tool_call_id"]: one["content"] for one in told if one["role"] == "tool"}
    asked = [call for turn in told for call in turn.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in asked}
    assert ids == {one: name for one, name in names.items() if name != "h"}


async def test_think_system_and_results_of_tools_reach_the_template() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    result = {"role": "tool", "content": "rain", "tool_name": "weather"}
    turns = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    named = call | {"id": "call_1_0", "type": "function"}
    theirs = [USER[0], turns[1] | {"tool_calls": [named]}]
    theirs.append({"role": "tool", "content": "rain", "tool_call_id": "call_1_0"})
    system = {"role": "system", "content": "Be brief."}
    async with chatting("Yes.", with_template(THINKING)) as (served, _, prompts):
        for path, body, other in (
            (CHAT_ROUTE, {"messages": turns}, {"messages": theirs}),
            (
                CHAT_ROUTE,
                {"messages": USER, "think": False},
                {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}},
            ),
            (
                CHAT_ROUTE,
                {"messages": USER, "think": "low"},
                {"messages": USER, "reasoning_effort": "low"},
            ),
            (
                TEXT_ROUTE,
                {"prompt": "Weather?", "system": "Be brief."},
                {"messages": [system, *USER]},
            ),
        ):
            await ask(served, path, **body)
            await post(served, CHAT, **other)
            assert prompts[-1] == prompts[-2] == prompts[-3], body


async def test_raw_texts_are_those_of_completions() -> None:
    schema = closed(days=DAYS)
    async with chatting() as (served, _, _):
        for body, other in (
            ({"options": {"num_predict": 5, "seed": 3}}, {"max_tokens": 5, "seed": 3}),
            (
                {"format": schema, "options": {"seed": 1, "repeat_penalty": 1.2}},
                {"json_schema": schema, "seed": 1, "repeat_penalty": 1.2, "max_tokens": -1},
            ),
            (
                {"format": "json", "options": {"seed": 1, "num_predict": 9}},
                {"response_format": {"type": "json_object"}, "seed": 1, "max_tokens": 9},
            ),
            (
                {"options": {"num_predict": 50, "seed": 3, "stop": ["e"]}},
                {"max_tokens": 50, "seed": 3, "stop": "e"},
            ),
        ):
            mine = await ask(served, TEXT_ROUTE, prompt="def", raw=True, **body)
            fields: JSON = {"prompt": "def", **other}
            theirs = await post(served, COMPLETIONS, **fields)
            (choice,) = theirs["choices"]
            assert (mine["response"], mine["done_reason"]) == (
                choice["text"],
                choice["finish_reason"],
            )


async def test_models_are_listed_with_a_tag_and_found_by_it() -> None:
    async with serving() as served:
        listed = (await served.client.get("/api/tags")).json()["models"]
        loaded = (await served.client.get("/api/ps")).json()["models"]
        (name,) = [one["name"] for one in listed]
        shown = (await served.client.post("/api/show", json={"model": name})).json()
        # Ollama's command sends every field.
        empty = {"system": "", "template": "", "options": None}
        told = {"model": name, "name": "", "verbose": False} | empty
        assert (await served.client.post("/api/show", json=told)).json() == shown
        told = {"model": name, "prompt": "", "suffix": "", "_debug_render_only": False} | empty
        first = await served.client.post(TEXT_ROUTE, json=told)
        found = await served.client.get(f"/v1/models/{name}")
        version = await served.client.get("/api/version")
        # By which clients find out if a server is there.
        heads = [await served.client.head(path) for path in ("/", "/api/tags", "/api/version")]
    assert [head.status_code for head in heads] == [200, 200, 200]
    assert name == f"{served.model.name}:latest"
    assert [one["name"] for one in loaded] == [name]
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == served.model.model_dir.chat_template
    assert (first.json()["model"], first.json()["done_reason"]) == (name, "load")
    assert (found.json()["id"], version.status_code) == (served.model.name, 200)


REFUSED: list[tuple[str, JSON, int, str]] = [
    ("/api/pull", {"model": "a"}, 404, "kvasir pull"),
    ("/api/create", {"model": "a"}, 404, "kvasir pull"),
    (TEXT_ROUTE, {"model": "a", "prompt": "a"}, 404, "'a'"),
    (TEXT_ROUTE, {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
    (TEXT_ROUTE, {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
    (TEXT_ROUTE, {"prompt": "a", "options": {"mirostat": 1}}, 400, "options.mirostat"),
    (TEXT_ROUTE, {"prompt": "a", "options": {"num_predct": 1}}, 400, "num_predict"),
    (TEXT_ROUTE, {"prompt": "a", "raw": True, "format": WRONG}, 400, "format: "),
    (CHAT_ROUTE, {"messages": [*USER], "format": WRONG}, 400, "format: "),
    (CHAT_ROUTE, {"messages": [*USER], "think": True}, 400, "think"),
    (CHAT_ROUTE, {"messages": [USER[0] | {"images": ["aa"]}]}, 400, "images"),
    ("/api/embed", {"input": "a"}, 400, "vectors"),
]


async def test_a_refusal_is_one_sentence() -> None:
    async with serving() as served:
        for path, body, status, word in REFUSED:
            response = await served.client.post(path, json=body)
            assert response.status_code == status, body
            (message,) = response.json().values()
            assert response.json().keys() == {"error"}
            assert word in message
