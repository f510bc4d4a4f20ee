"""/v1/responses: a chat's answer in its form, conversations by id, and the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from kvasir.server.api.openai.responses.schemas import LOGPROBS
from kvasir.server.api.openai.responses.store import ResponseStore
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.state import Key, Stored
from tests.kit.chats import (
    BOTH,
    HERMES_TEXT,
    THINKING,
    TIME,
    TOOLS,
    TOOLS_OF,
    chatting,
    with_template,
)
from tests.kit.dialects import RESPONSES, joined, parsed, post, without
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import live
from tests.kit.serving import MODEL, VOCAB_SIZE, small_tokenizer

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
FUNCTIONS = TOOLS_OF[RESPONSES]
REASONING_SHOWN = THINKING.replace(
    "{{ message.content or", "{{ message.reasoning_content }}{{ message.content or"
)


async def test_a_response_is_read_once_for_all_references_to_its_items() -> None:
    """Of another replica's each reading is a copy of all of it."""
    n_read = 0

    class Counted(MemoryState):
        async def get(self, key: Key) -> Stored | None:
            nonlocal n_read
            n_read += 1
            return await super().get(key)

    state, key = Counted(1000), (b"", "resp_1")
    await state.put(key, kept := Stored(b"{}", b"[]", b"[]"))
    store = ResponseStore(state)
    assert await store.of_items(b"", ["msg_1_0", "fc_1_1", "msg_1_0"]) == {key: kept}
    assert n_read == 1


async def test_a_response_over_http_is_a_chats_answer() -> None:
    text = "<think>\nHm.\n</think>\n\n" + HERMES_TEXT
    body: dict[str, Any] = {"tools": FUNCTIONS, "instructions": "Be brief.", "metadata": {"a": "b"}}
    async with chatting(text, with_template(THINKING)) as (served, client, prompts):
        whole = await post(served, RESPONSES, **body, include=[LOGPROBS], top_logprobs=2)
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
        ]
        chat = await client.chat.completions.create(messages=messages, tools=TOOLS, model=MODEL)
        cut = await post(served, RESPONSES, **body, max_output_tokens=9)
    assert prompts[0] == prompts[1]
    thought, message, *calls = whole["output"]
    assert chat.usage is not None
    assert (thought["content"][0]["text"], message["content"][0]["text"]) == ("Hm.", "Let me see.")
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == BOTH
    logprobs = message["content"][0]["logprobs"]
    assert "".join(bytes(b for one in logprobs for b in one["bytes"]).decode()).strip() == (
        "Let me see."
    )
    assert {len(one["top_logprobs"]) for one in logprobs} == {2}
    assert whole["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert whole["usage"]["output_tokens"] == chat.usage.completion_tokens
    assert whole["metadata"] == {"a": "b"}
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_large_response_that_is_kept_can_be_read() -> None:
    """One that is sent in pieces."""
    async with chatting("Hi.") as (served, _, _):
        made = await post(served, RESPONSES, metadata={"a": "b" * 100_000})
        path = f"{RESPONSES}/{made['id']}"
        for answer in (await served.client.get(path), await served.client.post(f"{path}/cancel")):
            assert (answer.status_code, answer.json()) == (200, made)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_number_beyond_all_floats_is_repeated_as_null(streams: bool) -> None:
    """It is JSON, but Python reads an infinity, which JSON has not."""
    body = b'{"input": "a", "max_output_tokens": 2, "metadata": {"a": 1e999}, "stream": %b}'
    async with chatting() as (served, _, _):
        response = await served.client.post(RESPONSES, content=body % json.dumps(streams).encode())
    assert response.status_code == 200, response.text
    *_, last = [line for line in response.text.splitlines() if line]
    answer = json.loads(last.removeprefix("data: "))
    assert answer.get("response", answer)["metadata"] == {"a": None}


@pytest.mark.parametrize("content", ["é", "a", "/w==", ""])
async def test_reasoning_of_another_server_cannot_be_read(content: str) -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": content}
    said = {"type": "message", "role": "user", "content": "Weather?"}
    async with chatting("Hi.", with_template(REASONING_SHOWN)) as (served, _, prompts):
        for seen in (foreign, foreign | {"encrypted_content": None}):
            await post(served, RESPONSES, input=[seen, said])
    assert prompts[0] == prompts[1]


async def test_a_conversation_by_id_is_the_same_sent_whole() -> None:
    """By previous_response_id, by references to items, and as items that clients send back."""
    said = {"type": "message", "role": "user", "content": "Weather?"}
    text = "<think>\nHm.\n</think>\n\n" + HERMES_TEXT
    body: dict[str, Any] = {"tools": FUNCTIONS, "temperature": 0, "instructions": "Be brief."}
    body["include"] = ["reasoning.encrypted_content"]
    async with chatting(text, with_template(REASONING_SHOWN)) as (served, _, prompts):
        first = await post(served, RESPONSES, **body)
        call_ids = [item["call_id"] for item in first["output"] if "call_id" in item]
        results = [
            {"type": "function_call_output", "call_id": i, "output": "rain"} for i in call_ids
        ]
        opaque = [
            item | {"content": None} if item["type"] == "reasoning" else item
            for item in first["output"]
        ]
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        by_id = body | {"previous_response_id": first["id"], "input": results}
        answers = [
            await post(served, RESPONSES, **given)
            for given in (
                by_id,
                body | {"input": [said, *references, *results]},
                body | {"input": [said, *first["output"], *results], "store": False},
                body | {"input": [said, *opaque, *results]},
            )
        ]
        again = await post(served, RESPONSES, **by_id | {"previous_response_id": answers[0]["id"]})
        listed = await served.client.get(f"/v1/responses/{again['id']}/input_items?limit=100")
        chat_prompt = prompts[1]
    assert all(prompt == chat_prompt for prompt in prompts[1:5])
    assert prompts[5][: len(chat_prompt)] == chat_prompt
    assert small_tokenizer().decode(chat_prompt).count("Hm.") == 1
    outputs = [without(one["output"]) for one in answers]
    assert outputs == outputs[:1] * 4
    items = listed.json()["data"]
    assert len(items) == 1 + 2 * (len(first["output"]) + 2)
    for item in items:
        ITEM.validate_python(item)
        assert item["id"]


async def test_other_keys_and_dropped_responses_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryState, "max_responses", 2)
    keys = tmp_path / "keys"
    keys.write_text("name=a k1\nname=b k2\n")
    async with chatting("Hi.", api_key_file=keys) as (served, _, _):
        headers = {key: {"authorization": f"Bearer {key}"} for key in ("k1", "k2")}

        async def ask(key: str, **body: Any) -> httpx.Response:
            body = {"input": "a"} | body
            return await served.client.post("/v1/responses", json=body, headers=headers[key])

        ids = [(await ask("k1")).json()["id"] for _ in range(3)]
        unkept = (await ask("k1", store=False)).json()["id"]
        url = "/v1/responses"
        for key, response_id, status in (
            ("k1", ids[2], 200), ("k1", ids[1], 200), ("k1", ids[0], 404), ("k2", ids[2], 404),
            ("k1", unkept, 404),
        ):  # fmt: skip
            for path in ("", "/input_items"):
                found = await served.client.get(f"{url}/{response_id}{path}", headers=headers[key])
                assert found.status_code == status
            followed = await ask(key, previous_response_id=response_id, store=False)
            assert followed.status_code == status
            if status == 404:
                assert followed.json()["error"]["param"] == "previous_response_id"
        reference = [{"type": "item_reference", "id": f"msg_{ids[2].removeprefix('resp_')}_0"}]
        assert (await ask("k1", input=reference)).status_code == 200  # drops ids[1]
        assert (await ask("k2", input=reference)).status_code == 404
        for status in (200, 404):
            gone = await served.client.delete(f"{url}/{ids[2]}", headers=headers["k1"])
            assert gone.status_code == status


async def test_structured_text_and_forced_calls() -> None:
    schema = {"type": "json_schema", "name": "time", "schema": TIME, "strict": True}
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]}
    only["tools"][0]["name"] = "time"  # type: ignore[index]
    async with chatting() as (served, _, _):
        held = await post(served, RESPONSES, text={"format": schema}, seed=1)
        for choice in ({"type": "function", "name": "time"}, only):
            body = {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False}
            (call,) = (await post(served, RESPONSES, **body, seed=2))["output"]
            jsonschema.validate(json.loads(call["arguments"]), TIME)
            assert (call["name"], call["status"]) == ("time", "completed")
    jsonschema.validate(json.loads(held["output"][0]["content"][0]["text"]), TIME)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_response_can_be_read_and_cancelled_while_it_is_streamed(is_cancelled: bool) -> None:
    """It may also fail before it has any text: "ð" is the first byte of four."""
    token = small_tokenizer().token_to_id("a" if is_cancelled else "ð")
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, next_token=lambda _: token)
    with live(runner) as served, served.http() as client:
        runner.hold()
        runner.allow(3)
        body = {"input": "a", "stream": True, "ignore_eos": True, "max_output_tokens": 1500}
        with client.stream("POST", RESPONSES, json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            (begun,) = parsed(RESPONSES, text.partition("\n\n")[0] + "\n\n")
            path = f"{RESPONSES}/{begun['response']['id']}"
            assert client.get(path).json()["status"] == "in_progress"
            if is_cancelled:
                assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
                runner.release()
            else:
                runner.wait_until_held()
                runner.fail()
            text += "".join(pieces)
        events = parsed(RESPONSES, text)
        last = events[-1]["response"]
        assert last["output"] == joined(RESPONSES, events)["output"]
        assert last["status"] == ("cancelled" if is_cancelled else "failed")
        statuses = [item["status"] for item in last["output"]]
        assert statuses == (["incomplete"] if is_cancelled else [])
        assert (last["error"] is None) is is_cancelled
        if is_cancelled:
            assert client.post(f"{path}/cancel").json() == last
