"""Chats for tests: templates, tools, and a server whose model says a given text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai

from kvasir.model.directory import ModelDirectory
from kvasir.server.engine.sequence import Sequence
from kvasir.server.requests.async_engine import OutputStream
from tests.kit.chat_templates import TOKENS
from tests.kit.dialects import CHAT, JSON, MESSAGES, RESPONSES, post
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import (
    CHAT_TEMPLATE,
    EOS,
    VOCAB_SIZE,
    Served,
    fake_model_dir,
    serving,
    small_tokenizer,
)

LONG = 2000  # tokens of context
LLAMA_CALLS = """\
{% for message in messages %}{{ message.role[0] }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}
{% endfor %}
{% if add_generation_prompt %}a>{% endif %}"""
# Reasoning begins with the answer, or with the prompt if `deep`; without `enable_thinking` it ends
# with the prompt.
THINKING = (
    CHAT_TEMPLATE.removesuffix("{% if add_generation_prompt %}a>{% endif %}\n")
    + """\
{% if add_generation_prompt %}a>{{ reasoning_effort }}
{%- if not enable_thinking | default(true) %}<think></think>{% elif deep %}<think>{% endif %}
{%- endif %}"""
)


def closed(**properties: Any) -> JSON:
    """Return the schema of an object with exactly these properties."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return schema | {"additionalProperties": False}


def tool(name: str, schema: JSON, **more: Any) -> JSON:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = closed(city={"enum": ["Rome", "Ulm"]}, days=DAYS)
TIME = closed(utc={"type": "boolean"})
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS: Any = [tool(name, schema) for name, schema in SCHEMAS.items()]
TOOLS_OF: dict[str, Any] = {  # in each dialect
    CHAT: TOOLS,
    RESPONSES: [{"type": "function"} | one["function"] for one in TOOLS],
    MESSAGES: [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
}
HERMES_TEXT = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "time", "arguments": {"utc": true}}\n</tool_call>'
)
BOTH = [("weather", {"city": "Rome", "days": 2}), ("time", {"utc": True})]  # calls of that text


def with_template(source: str | None, **changes: Any) -> ModelDirectory:
    model_dir = fake_model_dir(max_model_len=LONG, chat_template=source)
    return replace(model_dir, special_tokens=TOKENS, **changes)


@asynccontextmanager
async def chatting(
    answer: str | list[int] | None = None, model_dir: ModelDirectory | None = None, **settings: Any
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI, list[list[int]]]]:
    """A server whose model always gives one text, or any; OpenAI's client; the model's prompts."""
    ids = small_tokenizer().encode(answer).ids if isinstance(answer, str) else answer
    prompts: list[list[int]] = []

    def next_token(prefix: list[int]) -> int | None:
        place = len(prefix) - len(prompts[-1])
        return None if ids is None else [*ids, EOS][min(place, len(ids))]

    runner = FakeRunner(VOCAB_SIZE, max_model_len=LONG, next_token=next_token)
    model_dir = model_dir or fake_model_dir(max_model_len=LONG)
    async with serving(runner, model_dir=model_dir, **settings) as served:
        submit = served.model.engine.submit

        def noting(sequences: list[Sequence]) -> OutputStream:
            prompts.append(sequences[0].prompt_ids)
            return submit(sequences)

        served.model.engine.submit = noting  # type: ignore[method-assign]
        http: Any = served.client
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0
        )
        yield served, client, prompts


def calls_of(choice: JSON) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls in a chat's choice."""
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


async def choice_of(served: Served, **body: Any) -> JSON:
    """Return the first choice of a chat's answer."""
    choice: JSON = (await post(served, CHAT, **body))["choices"][0]
    return choice
