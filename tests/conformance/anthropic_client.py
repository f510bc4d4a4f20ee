"""Anthropic's package: messages, its stream helper, tools, token counts, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.conformance.server import CAPACITY, DAY, DAYS, MESSAGES, Calls, Conformed, Server

_WEATHER: Any = {"name": "weather", "input_schema": DAY}


class Reading(BaseModel):
    """The type of a structured answer."""

    good: bool


def use_anthropic(server: Server) -> Conformed:
    calls = Calls()
    options: dict[str, Any] = {"base_url": server.url, "api_key": server.key or "none"}
    options |= {"max_retries": 0}
    hooks = {"request": [calls.note]}
    http = anthropic.DefaultHttpxClient(event_hooks=hooks)
    with anthropic.Anthropic(**options, http_client=http) as client:
        _converse(client, server)
        _call_tools(client, server)
        _fail(client, server)
    hooks_async = {"request": [calls.note_async]}
    asynchronous = anthropic.DefaultAsyncHttpxClient(event_hooks=hooks_async)
    client_async = anthropic.AsyncAnthropic(**options, http_client=asynchronous)
    asyncio.run(_at_once(client_async, server))
    return Conformed("anthropic", anthropic.__version__, len(calls))


def _converse(client: anthropic.Anthropic, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "system": "Be brief."}
    count = client.messages.count_tokens(**body).input_tokens
    body |= {"extra_body": {"temperature": 0}, "max_tokens": 8}
    whole = client.messages.create(**body)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == count
    assert whole._request_id
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [b.to_dict() for b in whole.content]
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)
    events = [event.type for event in client.messages.create(**body, stream=True)]
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    answer: Any = {"role": "assistant", "content": whole.content}
    client.messages.create(**body | {"messages": [*MESSAGES, answer, *MESSAGES]})
    body |= {"max_tokens": 200, "output_format": Reading}
    assert isinstance(client.messages.parse(**body).parsed_output, Reading)


def _call_tools(client: anthropic.Anthropic, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 200}
    body |= {"tools": [_WEATHER], "extra_body": {"temperature": 0}}
    body["tool_choice"] = {"type": "tool", "name": "weather"}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        call: Any = message.content[0]
        kinds = (len(message.content), call.type, message.stop_reason)
        assert kinds == (1, "tool_use", "tool_use")
        assert (call.name, call.input in DAYS) == ("weather", True)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "well"}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        client.messages.create(**body | {"messages": [*MESSAGES, *turns]})


def _fail(client: anthropic.Anthropic, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 2}
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**body | {"max_tokens": -1})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**body | {"system": "a " * server.max_model_len}, stream=True)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**body | {"model": "another"})
    if server.key:
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**body)


async def _at_once(client: anthropic.AsyncAnthropic, server: Server) -> None:
    async def text(i: int) -> str:
        body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 8}
        body["extra_body"] = {"seed": i, "ignore_eos": True}
        async with client.messages.stream(**body) as stream:
            return await stream.get_final_text() if i else await _joined(stream)

    async with client:
        together = await asyncio.gather(*map(text, range(2 * CAPACITY)))
        assert together == [await text(i) for i in range(2 * CAPACITY)]


async def _joined(stream: Any) -> str:
    return "".join([piece async for piece in stream.text_stream])
