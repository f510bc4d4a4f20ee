"""The items of a Responses conversation: what a request may hold, and the messages they make."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from kvasir.server.api.openai.formatting import JSON, join
from kvasir.server.api.openai.schemas import Part, check_content
from kvasir.server.api.schemas import Items

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of the ids of items


class InputTextPart(Part):
    """A part of a message's content, or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _check_content(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    return check_content(value, "input_text", "output_text")


Content = Annotated[
    Items[InputTextPart],
    BeforeValidator(_check_content, json_schema_input_type=Items[InputTextPart] | str),
]


class MessageItem(Part):
    """A message, of the input or of an earlier output."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: str = Field(min_length=1, max_length=64)
    content: Content


class CallItem(Part):
    """An earlier call of a function."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Part):
    """The output of a function that was called."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: Content


class ReasoningPart(Part):
    """A part of earlier reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Part):
    """Earlier reasoning, for templates that show it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[ReasoningPart] = Field([])
    content: Items[ReasoningPart] = Field([])
    encrypted_content: str | None = Field(
        None, description="Read where content is missing; of another server it is ignored."
    )


class ReferenceItem(Part):
    """An item of the output of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


_KINDS = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


def _check_item(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"has the type {kind!r}, which is not served here; items are {', '.join(_KINDS)}"
        )
    return value | {"type": kind}


InputItem = Annotated[
    Annotated[MessageItem, Tag("<MessageItem>")]
    | Annotated[CallItem, Tag("<CallItem>")]
    | Annotated[CallOutputItem, Tag("<CallOutputItem>")]
    | Annotated[ReasoningItem, Tag("<ReasoningItem>")]
    | Annotated[ReferenceItem, Tag("<ReferenceItem>")],
    Discriminator(lambda item: f"<{_KINDS[item['type']].__name__}>"),
]
AnyItem = Annotated[InputItem, BeforeValidator(_check_item, json_schema_input_type=InputItem)]


def sealed(text: str) -> str:
    """Return reasoning in the form of `encrypted_content`, which clients send back as it is."""
    return b64encode(text.encode()).decode()


def _unsealed(content: str) -> str:
    try:
        return b64decode(content, validate=True).decode()
    except ValueError:  # not base64, or not of text
        return ""


def messages_of(items: Iterable[JSON]) -> list[JSON]:
    """Return the chat messages that items stand for.

    Reasoning, content and calls in a row are one message of the assistant. Content that follows
    content is the next.
    """
    messages: list[JSON] = []
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            last = messages[-1] if messages else {}
            is_open = last.get("role") == "assistant" and (
                kind == "function_call" or "content" not in last or "tool_calls" in last
            )
            if not is_open:
                messages.append({"role": "assistant"})
            join(messages[-1], _added(item))
    return messages


def _added(item: JSON) -> JSON:
    """Return the reasoning, content or call that an item adds to a message of the assistant."""
    if item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    if item["type"] == "message":
        return {"content": "".join(part["text"] for part in item["content"])}
    parts = item.get("content") or item.get("summary") or ()
    text = "\n\n".join(part["text"] for part in parts)
    text = text or _unsealed(item.get("encrypted_content") or "")
    return {"reasoning_content": text} if text else {}


def _content(parts: list[JSON]) -> str | list[dict[str, Any]]:
    """Return parts as chats have them; a lone one is a string, which every template takes."""
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]
