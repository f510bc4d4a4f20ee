"""litellm, instructor, LangChain and Ollama's package, in environments without Kvasir.

Arguments: the URL of the server, a model, a key, and one of the packages. Prints its number of
calls. None of them may reach anything but the server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded
USER: dict[str, Any] = {"role": "user", "content": "def"}
LONG: dict[str, Any] = {"role": "user", "content": "def " * 4000}


class Day(BaseModel):
    """The type of a structured answer, which an empty object has, too."""

    model_config = ConfigDict(extra="forbid")

    day: Literal["mon", "tue"] = "mon"


class Weather(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")

    day: Literal["mon", "tue"]


TOOL = {
    "type": "function",
    "function": {"name": "Weather", "parameters": Weather.model_json_schema()},
}


def use_litellm(url: str, model: str, key: str) -> int:
    """Speak chat, with a turn sent back, Responses and Messages."""
    import litellm  # noqa: PLC0415

    litellm.suppress_debug_info = True
    to_openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key}
    brief: dict[str, Any] = to_openai | {"max_tokens": 8, "temperature": 0, "num_retries": 0}
    whole = litellm.completion(messages=[USER], **brief)
    pieces = litellm.completion(messages=[USER], stream=True, **brief)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(messages=[USER], **to_openai, **forced).choices[0].message
    Weather.model_validate_json(called.tool_calls[0].function.arguments)
    # With the keys that it adds, such as provider_specific_fields.
    turn = [USER, called.model_dump(), _result(called.tool_calls[0].id)]
    second = litellm.completion(messages=turn, tools=[TOOL], **brief).choices[0].message
    third = [*turn, second.model_dump(), USER]
    assert litellm.completion(messages=third, **brief).usage.completion_tokens
    typed = litellm.completion(messages=[USER], response_format=Day, **to_openai)
    Day.model_validate_json(typed.choices[0].message.content)
    limited = {"max_output_tokens": 8, "temperature": 0}
    answer = litellm.responses(input="def", **to_openai, **limited)
    assert answer.status in ("completed", "incomplete")
    _require(
        litellm.ContextWindowExceededError,
        lambda: litellm.completion(messages=[LONG], **brief),
    )
    told = {"model": f"anthropic/{model}", "api_base": url, "api_key": key, "max_tokens": 8}
    assert litellm.completion(messages=[USER], **told).usage.completion_tokens
    return 9


def use_instructor(url: str, model: str, key: str) -> int:
    """Get a structured answer in each mode of OpenAI's and Anthropic's clients."""
    import anthropic  # noqa: PLC0415
    import httpx  # noqa: PLC0415
    import instructor  # noqa: PLC0415
    import openai  # noqa: PLC0415

    headers = {"authorization": f"Bearer {key}"}
    tokens = httpx.post(
        f"{url}/tokenize", json={"prompt": "}"}, headers=headers, timeout=60
    ).json()["tokens"]
    empty = {"logit_bias": {str(tokens[-1]): 100}}  # "{}", of the objects that may come
    day = '```json\n{"day": "tue"}\n```'
    mode = instructor.Mode

    def patched(one: instructor.Mode) -> Any:
        # A client that is patched again keeps what it was patched with before.
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        return instructor.from_openai(client, mode=one)

    more: dict[instructor.Mode, dict[str, Any]] = {
        mode.TOOLS: {},
        mode.TOOLS_STRICT: {},
        mode.FUNCTIONS: {},
        mode.JSON_SCHEMA: {},
        mode.JSON: {"extra_body": empty},
        # The text is free: without this, a model of random weights writes no JSON.
        mode.MD_JSON: {"extra_body": {"guided_choice": [day]}},
    }
    for one, extra in more.items():
        asked = {"model": model, "messages": [USER], "response_model": Day, "max_retries": 0}
        assert isinstance(patched(one).chat.completions.create(**asked, **extra), Day), one
    found = patched(mode.PARALLEL_TOOLS).chat.completions.create(
        model=model,
        messages=[USER],
        response_model=Iterable[Weather],
        extra_body={"tool_choice": "required", "parallel_tool_calls": False},  # it asks for auto
    )
    assert all(isinstance(one, Weather) for one in found)
    response = patched(mode.RESPONSES_TOOLS).responses.create(
        model=model, input="def", response_model=Day
    )
    assert isinstance(response, Day)
    claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    by_messages = instructor.from_anthropic(claude, mode=mode.ANTHROPIC_TOOLS)
    asked = {"model": model, "messages": [USER], "response_model": Day, "max_retries": 0}
    assert isinstance(by_messages.messages.create(**asked, max_tokens=200), Day)
    return len(more) + 3


def use_langchain_openai(url: str, model: str, key: str) -> int:
    """Speak chat and Responses."""
    from langchain_openai import ChatOpenAI  # noqa: PLC0415

    given: dict[str, Any] = {"base_url": f"{url}/v1", "model": model, "api_key": key}
    n_calls = 0
    for by_responses in (False, True):
        chat = ChatOpenAI(**given, use_responses_api=by_responses, max_retries=0, temperature=0)
        n_calls += _use_langchain(chat, chat.bind(max_tokens=8))
        for method in ("json_schema", "function_calling"):
            typed = chat.with_structured_output(Weather, method=method)
            assert isinstance(typed.invoke("def"), Weather)
            n_calls += 1
    return n_calls


def use_langchain_anthropic(url: str, model: str, key: str) -> int:
    """Speak Messages, and count tokens."""
    from langchain_anthropic import ChatAnthropic  # noqa: PLC0415
    from langchain_core.messages import HumanMessage  # noqa: PLC0415

    given: dict[str, Any] = {"base_url": url, "model": model, "api_key": key}
    chat = ChatAnthropic(**given, max_tokens=300, max_retries=0, temperature=0)
    assert isinstance(chat.with_structured_output(Weather).invoke("def"), Weather)
    assert chat.get_num_tokens_from_messages([HumanMessage("def")])
    return _use_langchain(chat, chat.bind(max_tokens=8)) + 2


def use_ollama(url: str, model: str, key: str) -> int:
    """Speak chat and texts, whole and streamed; find the model as Open WebUI does."""
    import ollama  # noqa: PLC0415

    client = ollama.Client(host=url, headers={"authorization": f"Bearer {key}"})
    (listed,) = client.list().models
    assert listed.model == f"{model}:latest"
    assert [one.model for one in client.ps().models] == [listed.model]
    assert "tools" in client.show(listed.model).capabilities
    brief: dict[str, Any] = {"num_predict": 8, "temperature": 0, "num_ctx": 4096}
    asked = {"model": listed.model, "options": brief, "keep_alive": "5m"}
    whole = client.chat(messages=[USER], **asked)
    parts = list(client.chat(messages=[USER], stream=True, **asked))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].done, parts[-1].eval_count) == (True, whole.eval_count)
    text = client.generate(prompt="def", **asked)
    lines = client.generate(prompt="def", stream=True, logprobs=True, top_logprobs=2, **asked)
    assert "".join(line.response for line in lines) == text.response
    typed = client.chat(model=model, messages=[USER], format=Weather.model_json_schema())
    Weather.model_validate_json(typed.message.content)
    call = {"function": {"name": "Weather", "arguments": {"day": "mon"}}}
    turn = [USER, {"role": "assistant", "tool_calls": [call]}]
    turn.append({"role": "tool", "tool_name": "Weather", "content": "rain"})
    assert client.chat(messages=turn, tools=[TOOL], **asked).done_reason
    _require(ollama.ResponseError, lambda: client.pull("other"))
    _require(ollama.ResponseError, lambda: client.chat("other", [USER]))
    return 11


def _use_langchain(chat: Any, brief: Any) -> int:
    """Answer whole and streamed, then call a tool and send its turn back."""
    from langchain_core.messages import HumanMessage, ToolMessage  # noqa: PLC0415

    whole = brief.invoke("def")
    assert "".join(piece.text for piece in brief.stream("def")) == whole.text
    called = chat.bind_tools([Weather], tool_choice="any").invoke("def")
    turn = [HumanMessage("def"), called]
    for call in called.tool_calls:
        Weather.model_validate(call["args"])
        turn.append(ToolMessage("rain", tool_call_id=call["id"]))
    assert called.tool_calls
    assert brief.bind_tools([Weather]).invoke(turn).usage_metadata["output_tokens"]
    return 4


def _result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "rain"}


def _require(kind: type[Exception], ask: Any) -> None:
    try:
        ask()
    except kind:
        return
    raise AssertionError(f"a request that must be refused is no {kind.__name__}")


USES = {
    "litellm": use_litellm,
    "instructor": use_instructor,
    "langchain-openai": use_langchain_openai,
    "langchain-anthropic": use_langchain_anthropic,
    "ollama": use_ollama,
}

if __name__ == "__main__":
    sys.stdout.write(str(USES[sys.argv[4]](*sys.argv[1:4])))
