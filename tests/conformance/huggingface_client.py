"""huggingface_hub's InferenceClient: TGI's routes, and chat."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import AsyncInferenceClient, ChatCompletionInputFunctionName, InferenceClient
from huggingface_hub import ChatCompletionInputToolChoiceClass as ToolChoice
from huggingface_hub.errors import ValidationError

from tests.conformance.server import DAY, DAYS, MESSAGES, Conformed, Server

_GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def use_huggingface(server: Server) -> Conformed:
    client = Mock(wraps=InferenceClient(server.url, token=server.key))  # counts the calls
    text = _generate(client)
    _chat(client)
    _call_functions(client)
    n_calls = len(client.method_calls) + asyncio.run(_generate_async(server, text))
    return Conformed("huggingface_hub", huggingface_hub.__version__, n_calls)


def _generate(client: Any) -> str:
    text: str = client.text_generation("def read", **_GREEDY)
    details = {"details": True, "decoder_input_details": True, "top_n_tokens": 2}
    whole = client.text_generation("def read", **details, **_GREEDY)
    assert whole.generated_text == text
    assert len(whole.details.tokens) == whole.details.generated_tokens
    assert [token.logprob is None for token in whole.details.prefill][:2] == [True, False]
    pieces = list(client.text_generation("def read", stream=True, details=True, **_GREEDY))
    assert pieces[-1].generated_text == text
    assert [piece.token.id for piece in pieces] == [token.id for token in whole.details.tokens]
    assert pieces[-1].details.finish_reason == whole.details.finish_reason
    assert client.text_generation("def read", return_full_text=True, **_GREEDY) == "def read" + text
    grammar = {"type": "json", "value": DAY}
    constrained = client.text_generation("def read", grammar=grammar, max_new_tokens=60)
    assert json.loads(constrained) in DAYS
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("a", max_new_tokens=0)
    with pytest.raises(ValidationError):
        list(client.text_generation("a", max_new_tokens=10**6, stream=True))
    return text


def _chat(client: Any) -> None:
    greedy = {"max_tokens": 6, "temperature": 0.0}
    text = client.chat_completion(MESSAGES, **greedy).choices[0].message.content
    stream = client.chat_completion(MESSAGES, **greedy, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    named = {"type": "json_schema", "json_schema": {"name": "day", "schema": DAY}}
    for response_format in (named, {"type": "json", "value": DAY}):
        answer = client.chat_completion(MESSAGES, response_format=response_format, max_tokens=60)
        assert json.loads(answer.choices[0].message.content) in DAYS


def _call_functions(client: Any) -> None:
    """Call a function, and continue with the client's message and the result."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": DAY}}]
    choice = ToolChoice(function=ChatCompletionInputFunctionName(name="weather"))
    answer = client.chat_completion(MESSAGES, tools=tools, tool_choice=choice, max_tokens=90)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in DAYS
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    client.chat_completion([*MESSAGES, message, result], tools=tools, max_tokens=2)


async def _generate_async(server: Server, expected: str) -> int:
    """Generate the same text with the asynchronous client, and return the number of calls."""
    async with AsyncInferenceClient(server.url, token=server.key) as asynchronous:
        client = Mock(wraps=asynchronous)
        assert await client.text_generation("def read", **_GREEDY) == expected
    return len(client.method_calls)
