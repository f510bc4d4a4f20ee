"""OpenAI's package: sync, async, streams, raw responses, and errors as its exceptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.server import CAPACITY, DAY, DAYS, MESSAGES, Calls, Conformed, Server

_WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": DAY}}


class Reading(BaseModel):
    """The type of a structured answer."""

    good: bool


def use_openai(server: Server) -> Conformed:
    calls = Calls()
    http = openai.DefaultHttpxClient(event_hooks={"request": [calls.note]})
    options: dict[str, Any] = {"base_url": server.openai_url, "api_key": server.key}
    options |= {"max_retries": 0}
    with openai.OpenAI(**options, http_client=http) as client:
        _complete(client, server)
        _chat(client, server)
        _call_functions(client, server)
        _fail(client, server)
    asynchronous = openai.DefaultAsyncHttpxClient(event_hooks={"request": [calls.note_async]})
    asyncio.run(_at_once(openai.AsyncOpenAI(**options, http_client=asynchronous), server))
    return Conformed("openai", openai.__version__, len(calls))


def _complete(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    body: dict[str, Any] = {"model": server.model, "prompt": "def read"}
    body |= {"temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**body, logprobs=2)
    text = whole.choices[0].text
    usage: Any = {"include_usage": True}
    chunks = list(client.completions.create(**body, stream=True, stream_options=usage))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    assert len(whole.choices[0].logprobs.token_logprobs or []) == whole.usage.completion_tokens
    raw = client.completions.with_raw_response.create(**body)
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.parse().choices[0].text == text
    several = client.completions.create(**body | {"prompt": ["def read", "x"]}, n=2, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(several.choices, ("def read", "def read", "x", "x"), strict=True):
        assert choice.text.startswith(prompt)
    by_ids = client.completions.create(**body | {"prompt": [5, 6, 7]})
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3


def _chat(client: openai.OpenAI, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "messages": MESSAGES}
    body |= {"temperature": 0, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=1)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content
    predicted = client.chat.completions.create(
        **body, prediction={"type": "content", "content": [{"type": "text", "text": text}]}
    )
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None
    assert predicted.usage.completion_tokens_details is not None
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens is not None
    parsed = client.chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Reading
    )
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Reading)
    client.chat.completions.create(**body | {"messages": [*MESSAGES, message, *MESSAGES]})


def _call_functions(client: openai.OpenAI, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0}
    body |= {"tools": [_WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**body).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in DAYS
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    (streamed,) = final.message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    _continue_after_calls(client, body)


def _continue_after_calls(client: openai.OpenAI, body: dict[str, Any]) -> None:
    """Send the parsed calls back with the functions' results, as an agent does."""
    body |= {"tools": [openai.pydantic_function_tool(Reading)]}
    parsed = client.chat.completions.parse(**body).choices[0].message
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (parsed, streamed):
        (call,) = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Reading)
        result = {"role": "tool", "tool_call_id": call.id, "content": "well"}
        client.chat.completions.create(**body | {"messages": [*MESSAGES, message, result]})


def _fail(client: openai.OpenAI, server: Server) -> None:
    body: dict[str, Any] = {"model": server.model, "prompt": "a", "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(**body, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError):  # it makes no vectors
        client.embeddings.create(model=server.model, input="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**body | {"max_tokens": 10**6}, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(**body)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**body | {"model": "another"})
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="a")
    with pytest.raises(openai.APIConnectionError):
        client.with_options(base_url="http://127.0.0.1:9").completions.create(**body)
    longest = body | {"max_tokens": server.max_model_len - 10, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.005).completions.create(**longest)
    with _occupied(client, longest), pytest.raises(openai.RateLimitError) as busy:
        client.completions.create(**body, n=2 * CAPACITY)
    assert int(busy.value.response.headers["retry-after"]) >= 1


@contextmanager
def _occupied(client: openai.OpenAI, longest: dict[str, Any]) -> Iterator[None]:
    """Fill all slots with a stream that has begun."""
    with client.completions.create(**longest, n=CAPACITY, stream=True) as stream:
        next(stream)
        yield


async def _at_once(client: openai.AsyncOpenAI, server: Server) -> None:
    patient = client.with_options(max_retries=9)  # streams that were closed may still hold slots

    async def text(i: int) -> str:
        body: dict[str, Any] = {"model": server.model, "prompt": "def read"[: 1 + i]}
        body |= {"max_tokens": 8, "seed": i}
        stream = await patient.completions.create(**body, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with client:
        together = await asyncio.gather(*map(text, range(2 * CAPACITY)))
        assert together == [await text(i) for i in range(2 * CAPACITY)]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=server.model, messages=[])
