"""openai-agents and pydantic-ai, in an environment without Kvasir; both speak Responses by default.

Arguments: the URL of OpenAI's API, a model, a key, and one of the packages. Prints its number of
calls.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client
from agents import set_tracing_disabled as disable_tracing
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Day(BaseModel):
    """The type of a structured answer."""

    day: Literal["mon", "tue"]


def weather(day: Literal["mon", "tue"]) -> str:
    """Return the weather of a day."""
    return f"rain on {day}"


async def main(url: str, model: str, key: str, package: str) -> None:
    calls: list[str] = []

    async def note(request: Any) -> None:
        calls.append(request.url.path)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
    client = openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, max_retries=0)
    uses = {"openai-agents": _use_agents, "pydantic-ai-slim": _use_pydantic_ai}
    await uses[package](client, model)
    assert set(calls) == {"/v1/responses"}
    sys.stdout.write(str(len(calls)))


async def _use_agents(client: openai.AsyncOpenAI, model: str) -> None:
    set_default_openai_client(client, use_for_tracing=False)
    disable_tracing(disabled=True)
    # It raises an error for an answer that a limit has cut, so token 0, the text's end, comes.
    ending = {"min_tokens": 4, "logit_bias": {"0": 100}}
    brief = ModelSettings(temperature=0, max_tokens=8, extra_body=ending)
    plain: Agent[Any] = Agent(name="plain", instructions="x", model=model, model_settings=brief)
    whole = await Runner.run(plain, "def")
    stream = Runner.run_streamed(plain, "def")
    assert [event async for event in stream.stream_events()]
    assert stream.final_output == whole.final_output
    again = await Runner.run(plain, [*whole.to_input_list(), {"role": "user", "content": "def"}])
    by_id = await Runner.run(plain, "def", previous_response_id=whole.last_response_id)
    assert by_id.final_output == again.final_output
    typed: Agent[Any] = Agent(name="typed", model=model, output_type=Day)
    assert isinstance((await Runner.run(typed, "def")).final_output, Day)
    caller: Agent[Any] = Agent(
        name="caller",
        model=model,
        tools=[function_tool(weather)],
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    called = await Runner.run(caller, "def")
    assert called.final_output in ("rain on mon", "rain on tue")
    back = [*called.to_input_list(), {"role": "user", "content": "def"}]
    assert (await Runner.run(plain, back)).final_output


async def _use_pydantic_ai(client: openai.AsyncOpenAI, model: str) -> None:
    responses = OpenAIResponsesModel(model, provider=OpenAIProvider(openai_client=client))
    settings: Any = {"temperature": 0.0, "max_tokens": 8}
    plain = PydanticAgent(responses, model_settings=settings)
    whole = await plain.run("def")
    async with plain.run_stream("def") as stream:
        assert await stream.get_output() == whole.output
    assert (await plain.run("def", message_history=whole.all_messages())).output
    # By default the output is the arguments of a call.
    typed = await PydanticAgent(responses, output_type=Day).run("def")
    assert isinstance(typed.output, Day)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
