"""The dialects of texts: a request in each, and what the events of its streams add up to.

Every event fits the type of the dialect's official client.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from huggingface_hub import TextGenerationStreamOutput
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvasir.server.api.openai.answers import CompletionChoice
from kvasir.server.api.routes import ROUTES, _error_kinds
from tests.kit.serving import Served

JSON = dict[str, Any]
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES, GENERATE, GENERATE_STREAM = "/v1/responses", "/generate", "/generate_stream"
USER: Any = [{"role": "user", "content": "Weather?"}]
LEAST: dict[str, JSON] = {  # that each takes
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": USER},
    MESSAGES: {"messages": USER, "max_tokens": 1000},
    RESPONSES: {"input": "Weather?"},
    GENERATE: {"inputs": "a"},
    GENERATE_STREAM: {"inputs": "a"},
}


def anthropic_types() -> Any:
    """Return the types of messages: their 3,000 modules load for the tests that need them alone."""
    return importlib.import_module("anthropic.types")


@cache
def documented(path: str, *, is_error: bool = False) -> TypeAdapter[Any]:
    """Return the type of a route's answers or errors, of which the OpenAPI document is made."""
    if is_error:
        (kind,) = _error_kinds(path, "post")
        return TypeAdapter(kind)
    (route,) = (one for one in ROUTES if one.path == path and "POST" in (one.methods or ()))
    return TypeAdapter(route.response_model)


async def post(served: Served, path: str, *, status: int = 200, **fields: Any) -> JSON:
    """Return the answer to a body with these fields. It fits the types of server and client."""
    response = await served.client.post(path, json=LEAST[path] | fields)
    assert response.status_code == status, response.text
    documented(path, is_error=status >= 400).validate_json(response.content)
    answer: JSON = response.json()
    if status == 200 and path in (MESSAGES, RESPONSES):
        kind = anthropic_types().Message if path == MESSAGES else Response
        kind.model_validate(_in_time(answer), strict=True)
    return answer


async def stream(served: Served, path: str, **fields: Any) -> list[JSON]:
    """Return the events of the answer to a body with these fields."""
    streamed = {} if path == GENERATE_STREAM else {"stream": True}
    response = await served.client.post(path, json=LEAST[path] | streamed | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return parsed(path, response.text)


# Streams

_EVENT = re.compile(r"(?:event: (?P<name>[\w.]+)\n)?data: ?(?P<data>.+)")
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _check_completion(event: JSON) -> None:
    """Parse an event of text. The package's type knows no choices that go on, and no prompts."""
    choices = [one | {"finish_reason": "stop"} for one in event["choices"]]
    for choice in choices:
        CompletionChoice.model_validate(choice)
    choices = [one | {"logprobs": None} for one in choices]
    Completion.model_validate(event | {"choices": choices}, strict=True)


def _check_chat(event: JSON) -> None:
    """Parse an event of a chat. The package knows no deadlines."""
    choices = [
        one | {"finish_reason": "stop"} if one["finish_reason"] == "timeout" else one
        for one in event["choices"]
    ]
    ChatCompletionChunk.model_validate(event | {"choices": choices}, strict=True)


@cache
def _message_event() -> TypeAdapter[Any]:
    return TypeAdapter(anthropic_types().RawMessageStreamEvent)


def _check_message(event: JSON) -> None:
    if event["type"] != "ping":
        _message_event().validate_python(event)


def _in_time(answer: JSON) -> JSON:
    """Return a response as if it had its end in time: the package knows no other."""
    return answer | {"incomplete_details": None} if "incomplete_details" in answer else answer


def _check_response(event: JSON) -> None:
    response = {"response": _in_time(event["response"])} if "response" in event else {}
    _RESPONSE_EVENT.validate_python(event | response)


_CHECKS: dict[str, Callable[[JSON], Any]] = {
    COMPLETIONS: _check_completion,
    CHAT: _check_chat,
    MESSAGES: _check_message,
    RESPONSES: _check_response,
    GENERATE_STREAM: TextGenerationStreamOutput.parse_obj,
    "/": TextGenerationStreamOutput.parse_obj,
}


def parsed(path: str, stream: str) -> list[JSON]:
    """Return the events of a whole stream, without OpenAI's [DONE] and signs of life.

    Each fits its type, and is named by it where the dialect has names. An error is the last event.
    """
    parts = stream.split("\n\n")
    assert parts.pop() == ""
    if path.endswith("completions"):
        assert parts.pop() == "data: [DONE]"
    events = []
    for part in parts:
        if part.startswith(":"):
            continue
        found = _EVENT.fullmatch(part)
        assert found is not None, part
        events.append(json.loads(found["data"]))
        named = {MESSAGES: events[-1].get("type"), RESPONSES: events[-1].get("type")}
        assert found["name"] == named.get(path)
    is_failed = bool(events) and "error" in events[-1]
    for event in events[:-1] if is_failed else events:
        _CHECKS[path](event)
    return events


def added(old: Any, new: Any) -> Any:
    """Return two parts as one: objects by key, texts and lists end to end; else the new holds."""
    if isinstance(new, dict) and isinstance(old, dict):
        return old | {key: added(old.get(key), value) for key, value in new.items()}
    if isinstance(new, str | list) and isinstance(old, str | list):
        return old + new  # type: ignore[operator]
    return old if new is None else new


def joined(path: str, events: list[JSON]) -> JSON:
    """Return the answer that the events of a stream add up to, but for ids and usage in choices."""
    if path == MESSAGES:
        return _joined_message(events)
    if path == RESPONSES:
        return {**events[-1]["response"], "output": assembled(events)}
    if path == GENERATE_STREAM:
        return {"generated_text": events[-1]["generated_text"], "details": events[-1]["details"]}
    choices: dict[int, JSON] = {}
    for part in (part for event in events for part in event["choices"]):
        index = part["index"]
        assert index in choices or path == COMPLETIONS or part["delta"]["role"] == "assistant"
        assert choices.get(index, {}).get("finish_reason") is None, "nothing follows the end"
        choices[index] = added(choices.get(index), part)
    return {"choices": [_whole_choice(choices[index]) for index in sorted(choices)]}


def _whole_choice(choice: JSON) -> JSON:
    """Return a choice with a message for a delta, whose calls are joined."""
    if "delta" not in choice:
        return choice
    message = choice.pop("delta") | {"refusal": None}
    calls: list[JSON] = []
    for part in message.pop("tool_calls", ()):
        index = part.pop("index")
        if "id" in part:
            assert index == len(calls)
            calls.append(part)
        else:
            assert index == len(calls) - 1
            calls[-1] = added(calls[-1], part)
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return choice | {"message": message}


def _joined_message(events: list[JSON]) -> JSON:
    """Return the message that a stream adds up to, as Anthropic's package adds it up."""
    assert [i for i, one in enumerate(events) if one["type"] == "message_stop"] == [len(events) - 1]
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    n_open = 0  # blocks do not overlap
    accumulate = importlib.import_module("anthropic.lib.streaming._messages").accumulate_event
    for event in events:
        n_open += (event["type"] == "content_block_start") - (event["type"] == "content_block_stop")
        assert n_open == 1 if event["type"] == "content_block_delta" else n_open in (0, 1)
        parsed = _message_event().validate_python(event)
        snapshot = accumulate(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    message: JSON = json.loads(snapshot.to_json(exclude_unset=True))
    del message["stop_details"]  # which the package adds
    return message


def assembled(events: list[JSON]) -> list[JSON]:
    """Return the output that deltas of a response make; the slow way to read a stream."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert [i for i, e in enumerate(events) if e["type"] in ENDS] == [len(events) - 1]
    output: list[JSON] = []
    for event in events[2:-1]:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(output)
            output.append(event["item"])
            continue
        item = output[place]
        assert place == len(output) - 1, "one item grows at a time"
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            item |= {k: v for k, v in event["item"].items() if k == "encrypted_content"}
            assert event["item"] == item
        elif kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith("arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert item["arguments"] == event["arguments"]
        elif kind.endswith("text.delta"):
            item["content"][0]["text"] += event["delta"]
            item["content"][0].setdefault("logprobs", []).extend(event.get("logprobs", []))
        elif kind.endswith("text.done"):
            assert item["content"][0]["text"] == event["text"]
        else:
            assert kind == "content_part.done"
            if item["type"] == "reasoning":
                item["content"][0].pop("logprobs", None)
            assert item["content"] == [event["part"]]
    return output


ENDS = {"response.completed", "response.incomplete", "response.failed"}
OWN = {"id", "call_id", "item_id", "created", "created_at", "completed_at", "encrypted_content"}


def without(value: Any, keys: set[str] = OWN) -> Any:
    """Return a value without some keys: those that differ from answer to answer."""
    if isinstance(value, dict):
        return {key: without(one, keys) for key, one in value.items() if key not in keys}
    return [without(one, keys) for one in value] if isinstance(value, list) else value


def assert_close(actual: Any, expected: Any) -> None:
    """Compare values, of which numbers may be in base64."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = [actual[name] for name in expected], [*expected.values()]
    if isinstance(expected, list):
        if isinstance(actual, str):
            raw = base64.b64decode(actual)
            actual = struct.unpack(f"<{len(raw) // 4}f", raw)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert actual == expected
