"""/v1/responses: the events and the whole, conversations by id, the store, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_input_item import ResponseInputItem
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from server.engine.engine import TokenOutput
from server.engine.sequence import FinishReason
from server.requests.completion import Completion, Delta
from server.text.detokenizer import Detokenizer
from tests.api.test_chat_completions import (
    BOTH,
    HERMES_TEXT,
    LONG,
    SCHEMAS,
    TIME,
    TOOLS,
    chatting,
    with_template,
)
from tests.api.test_reasoning import THINKING
from tests.fake_runner import FakeRunner
from tests.live import KEY, live
from tests.serving import EOS, VOCAB_SIZE, Served, fake_bundle, serving, small_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
FUNCTIONS: Any = [{"type": "function"} | tool["function"] for tool in TOOLS]
ENDS = {"response.completed", "response.incomplete", "response.failed"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def post(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await served.client.post("/v1/responses", json={"input": "Weather?"} | body)
    answer: dict[str, Any] = response.json()
    assert response.status_code == status, answer
    if status == 200:
        Response.model_validate(answer, strict=True)
    return answer


def parsed(stream: str) -> list[dict[str, Any]]:
    """Return the data of events, each named by its type and in OpenAI's form."""
    found = []
    for one in stream.split("\n\n"):
        name, _, data = one.partition("\n")
        if name.startswith("event: "):
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
            EVENT.validate_python(found[-1])
        else:
            assert one == "" or one.startswith(":"), one
    return found


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    body = {"input": "Weather?", "stream": True} | body
    response = await served.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return parsed(response.text)


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that deltas alone make; the slow way to read a stream."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert [i for i, e in enumerate(events) if e["type"] in ENDS] == [len(events) - 1]
    output: list[dict[str, Any]] = []
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
            assert event["item"] | {"encrypted_content": None} == item | {"encrypted_content": None}
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


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = {"id", "call_id", "created_at", "completed_at", "encrypted_content"}
        return {key: without_ids(one) for key, one in value.items() if key not in dropped}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def answers(seed: int) -> str:
    """Return a random text of reasoning, content and calls, in any order that models write."""
    random_ = random.Random(seed)
    words = ["Rome", " is", " warm", ".\n", "é☃", " <b", "{", " ", "</t", "a" * 30]

    def text(n: int) -> str:
        return "".join(random_.choices(words, k=random_.randrange(n)))

    thought = f"<think>{text(9)}</think>\n" if random_.random() < 0.6 else ""
    parts = [thought, text(9)]
    for _ in range(random_.randrange(4)):
        call = {"name": random_.choice(["weather", "time"]), "arguments": {"x": text(5)}}
        parts += [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", random_.choice(["", "\n", text(4)])]
    return "".join(parts)


@pytest.mark.parametrize("seed", range(12))
async def test_a_stream_sums_up_to_the_response(seed: int) -> None:
    random_ = random.Random(seed)
    body: dict[str, Any] = {"tools": FUNCTIONS, "parallel_tool_calls": random_.random() < 0.7}
    body |= random_.choice([{}, LOGPROBS, {"include": ["reasoning.encrypted_content"]}])
    async with chatting(answers(seed), with_template(THINKING)) as (served, _, _):
        n_tokens = (await post(served, **body))["usage"]["output_tokens"]
        limits = [None, *random_.sample(range(1, n_tokens + 1), min(3, n_tokens))]
        for limit in limits:
            whole = await post(served, **body, max_output_tokens=limit)
            events = await stream(served, **body, max_output_tokens=limit)
            assert without_ids(assembled(events)) == without_ids(whole["output"])
            end = events[-1]
            assert without_ids(end["response"]) == without_ids(whole)
            assert end["type"] == f"response.{whole['status']}"
            is_cut = limit is not None and limit <= n_tokens and whole["status"] == "incomplete"
            assert whole["incomplete_details"] == (
                {"reason": "max_output_tokens"} if is_cut else None
            )
            assert (whole["completed_at"] is None) == is_cut
            created = events[0]["response"]
            assert (created["status"], created["output"]) == ("in_progress", [])
