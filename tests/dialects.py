"""The dialects of streams: their events, each in the form of the official client's types."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from anthropic.types import RawMessageStreamEvent
from huggingface_hub import TextGenerationStreamOutput
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from kvasir.server.api.openai.answers import CompletionChoice

Event = dict[str, Any]
_EVENT = re.compile(r"(?:event: (?P<name>[\w.]+)\n)?data: ?(?P<data>.+)")
_MESSAGE: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_RESPONSE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _check_completion(event: Event) -> None:
    """Parse an event of text. The package's type knows no choices that go on, and no prompts."""
    choices = [one | {"finish_reason": "stop"} for one in event["choices"]]
    for choice in choices:
        CompletionChoice.model_validate(choice)
    choices = [one | {"logprobs": None} for one in choices]
    Completion.model_validate(event | {"choices": choices}, strict=True)


def _check_chat(event: Event) -> None:
    ChatCompletionChunk.model_validate(event, strict=True)


def _check_message(event: Event) -> None:
    if event["type"] not in ("ping", "error"):
        _MESSAGE.validate_python(event)


def _check_response(event: Event) -> None:
    """Parse an event of a response. The package's type knows no response that ends in time."""
    response = event.get("response")
    if response is not None:
        event = event | {"response": response | {"incomplete_details": None}}
    _RESPONSE.validate_python(event)


_CHECKS: dict[str, Callable[[Event], Any]] = {
    "/v1/completions": _check_completion,
    "/v1/chat/completions": _check_chat,
    "/v1/messages": _check_message,
    "/v1/responses": _check_response,
    "/generate_stream": TextGenerationStreamOutput.parse_obj,
    "/": TextGenerationStreamOutput.parse_obj,
}


def parsed(path: str, stream: str) -> list[Event]:
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
        has_name = path in ("/v1/messages", "/v1/responses")
        assert found["name"] == (events[-1]["type"] if has_name else None)
    is_failed = bool(events) and "error" in events[-1]
    for event in events[:-1] if is_failed else events:
        _CHECKS[path](event)
    return events
