"""/v1/responses: the events and the whole, conversations by id, the store, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from kvasir.server.api.http import pieces
from kvasir.server.api.http.pieces import Written
from kvasir.server.api.openai.responses.formatting import ResponseFormatter
from kvasir.server.api.openai.responses.schemas import LOGPROBS, ResponsesBody
from kvasir.server.api.openai.responses.store import ResponseStore, Stored
from kvasir.server.api.openai.tools import AnswerForm
from kvasir.server.engine.sampling import TokenLogprobs
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.service import Service
from kvasir.server.settings import load_settings
from kvasir.server.text.reasoning import ReasoningFormat
from kvasir.server.text.tool_formats import ToolCallFormat
from tests.api.test_chat_completions import BOTH, HERMES_TEXT, TIME, TOOLS, chatting, with_template
from tests.api.test_reasoning import THINKING
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.live import live
from tests.serving import EOS, MODEL, VOCAB_SIZE, Served, fake_bundle, serving, small_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
FUNCTIONS: Any = [{"type": "function"} | tool["function"] for tool in TOOLS]
ENDS = {"response.completed", "response.incomplete", "response.failed"}
LOGPROBS_OF_TWO: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 2}
IDS = {"id", "call_id", "created_at", "completed_at", "encrypted_content"}
SERVICE = Service(load_settings(model=Path(MODEL)), fake_bundle())
REASONING_SHOWN = THINKING.replace(
    "{{ message.content or", "{{ message.reasoning_content }}{{ message.content or"
)


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
            in_time = without(found[-1], {"incomplete_details"})  # openai knows no timeouts
            EVENT.validate_python(in_time)
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
            item |= {k: v for k, v in event["item"].items() if k == "encrypted_content"}
            assert event["item"] == item
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


def without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(one, keys) for key, one in value.items() if key not in keys}
    return [without(one, keys) for one in value] if isinstance(value, list) else value


def answer(random_: random.Random) -> tuple[str, list[str]]:
    """Return the text of a random answer, and the texts of its items without space."""
    words = ["Rome", " is", " warm", ".\n", "é☃", " <b", "{", " ", "</t", "a" * 30]

    def words_of(n: int) -> str:
        return "".join(random_.choices(words, k=random_.randrange(n)))

    parts, texts = [], []
    if random_.random() < 0.6:
        parts, texts = [f"<think>{(thought := words_of(9))}</think>\n"], [thought]
    for _ in range(random_.randrange(4)):
        content, call = words_of(6), {"name": "weather", "arguments": {"x": words_of(5)}}
        parts += [content, f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>\n"]
        texts += [content, json.dumps(call["arguments"])]
    parts.append(words_of(6))
    return "".join(parts), ["".join(one.split()) for one in [*texts, parts[-1]] if one.strip()]


def formatter(body: ResponsesBody, max_calls: int | None = None) -> ResponseFormatter:
    """Return a formatter for a model that reasons and calls as Hermes does."""
    form = AnswerForm(
        ReasoningFormat.THINK, False, False, ToolCallFormat.HERMES, max_calls, {}, None, frozenset()
    )
    params: Any = SimpleNamespace(temperature=1.0, top_p=0.9)
    wanted = CompletionRequest(prompts=[], params=params)
    return ResponseFormatter(SERVICE, body, wanted, form, (b"", "resp_1"))


def joined(made: Written) -> bytes:
    return made if isinstance(made, bytes) else b"".join(made)


def cut(text: str, reason: str, random_: random.Random) -> Iterator[list[Delta]]:
    """Yield the deltas of a text, cut anywhere, and in groups as the engine hands them out."""
    choice: Any = SimpleNamespace(shown_reason=None)
    group: list[Delta] = []
    while text:
        n = random_.randrange(8)
        piece, text = text[:n], text[n:]
        top = ((1, -0.5), (EOS, -2.0))
        scored = TokenLogprobs.of(random_.randrange(VOCAB_SIZE), -1.0, top, 2)
        group.append(Delta(choice, [0], piece, 0, scored, None, None))
        if random_.random() < 0.7:
            yield group
            group = []
    yield [*group, Delta(choice, [0], "", 0, None, None, FinishReason(reason))]


@pytest.mark.parametrize("seed", range(150))
def test_a_stream_sums_up_to_the_response(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    include = random_.choice([[], [LOGPROBS], ["reasoning.encrypted_content"]])
    body = ResponsesBody.model_validate({"input": "a", "include": include})
    (text, expected), reason = answer(random_), random_.choice(["stop", "length", "timeout"])
    max_calls = random_.choice([None, 1])
    if random_.random() < 0.5:  # as if its log-probabilities were many
        monkeypatch.setattr(pieces, "FEW", 1)
    # Other cuts of the text give other deltas, and the same response.
    streamed, whole = (formatter(body, max_calls) for _ in range(2))
    stream = b""
    for one in (streamed, whole):
        completion: Any = SimpleNamespace(n_prompt_tokens=3, n_completion_tokens=4)
        completion.n_cached_tokens, completion.stop = 1, lambda _: None
        one.completion = completion
        for deltas in cut(text, reason, random_):
            if one is streamed:
                stream += b"".join(joined(one.chunk(delta)) for delta in deltas)
            else:
                list(map(one.add, deltas))
    events = parsed((stream + joined(streamed.tail())).decode())
    response = json.loads(joined(pieces.written(whole.whole())))
    Response.model_validate(response | {"incomplete_details": None}, strict=True)
    output = assembled(events)
    assert output == events[-1]["response"]["output"]
    assert without(output, IDS | {"logprobs"}) == without(response["output"], IDS | {"logprobs"})
    assert events[-1]["type"] == f"response.{response['status']}"
    if max_calls is None and reason == "stop":
        texts = [item.get("arguments") or item["content"][0]["text"] for item in output]
        assert ["".join(one.split()) for one in texts if one.strip()] == expected


async def test_a_response_over_http_is_a_chats_answer() -> None:
    text = "<think>\nHm.\n</think>\n\n" + HERMES_TEXT
    body: dict[str, Any] = {"tools": FUNCTIONS, "instructions": "Be brief.", "metadata": {"a": "b"}}
    async with chatting(text, with_template(THINKING)) as (served, client, prompts):
        whole = await post(served, **body, **LOGPROBS_OF_TWO)
        events = await stream(served, **body, **LOGPROBS_OF_TWO)
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
        ]
        chat = await client.chat.completions.create(messages=messages, tools=TOOLS, model=MODEL)
        cut = await post(served, **body, max_output_tokens=9)
    assert prompts[0] == prompts[1] == prompts[2]
    assert without(assembled(events), IDS) == without(whole["output"], IDS)
    assert without(events[-1]["response"], IDS) == without(whole, IDS)
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


async def test_a_conversation_by_id_is_the_same_sent_whole() -> None:
    """By previous_response_id, by references to items, and as items that clients send back."""
    said = {"type": "message", "role": "user", "content": "Weather?"}
    text = "<think>\nHm.\n</think>\n\n" + HERMES_TEXT
    body: dict[str, Any] = {"tools": FUNCTIONS, "temperature": 0, "instructions": "Be brief."}
    body["include"] = ["reasoning.encrypted_content"]
    async with chatting(text, with_template(REASONING_SHOWN)) as (served, _, prompts):
        first = await post(served, **body)
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
            await post(served, **given)
            for given in (
                by_id,
                body | {"input": [said, *references, *results]},
                body | {"input": [said, *first["output"], *results], "store": False},
                body | {"input": [said, *opaque, *results]},
            )
        ]
        again = await post(served, **by_id | {"previous_response_id": answers[0]["id"]})
        listed = await served.client.get(f"/v1/responses/{again['id']}/input_items?limit=100")
        chat_prompt = prompts[1]
    assert all(prompt == chat_prompt for prompt in prompts[1:5])
    assert prompts[5][: len(chat_prompt)] == chat_prompt
    assert small_tokenizer().decode(chat_prompt).count("Hm.") == 1
    outputs = [without(one["output"], IDS) for one in answers]
    assert outputs == outputs[:1] * 4
    items = listed.json()["data"]
    assert len(items) == 1 + 2 * (len(first["output"]) + 2)
    for item in items:
        ITEM.validate_python(item)
        assert item["id"]


async def test_other_keys_and_dropped_responses_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.server.api.openai.responses.store.MAX_RESPONSES", 2)
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


def test_the_oldest_of_who_has_most_go_first_and_all_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.server.api.openai.responses.store.MAX_RESPONSES", 5)
    random_ = random.Random(1)
    responses, kept = ResponseStore(100), dict[tuple[bytes, str], int]()
    for i in range(300):
        size = random_.randrange(1, 110)
        key = random_.choice([b"a", b"b", b"b"]), str(i)
        responses.put(key, Stored(b"x" * size, b"", b""))
        if size <= 100:
            kept[key] = size
        while len(kept) > 5 or sum(kept.values()) > 100:
            weights = dict.fromkeys(kept, 1) if len(kept) > 5 else kept
            used = {one: sum(weights[k] for k in kept if k[0] == one) for one, _ in kept}
            assert not (len(used) == 2 and used[b"a"] == used[b"b"])  # ties would be anybody's
            most = max(used, key=lambda one: used[one])
            del kept[next(k for k in kept if k[0] == most)]
        if kept and random_.random() < 0.3:
            gone = random_.choice(list(kept))
            responses.pop(gone)
            del kept[gone]
        assert len(responses) == len(kept)
        assert all(responses.get(one).n_bytes == size for one, size in kept.items())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "custom"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "sometimes"}, "sometimes"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "'f'"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "file_search_call.results"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": [{"type": "mcp_call", "id": "a"}]}, "mcp_call"),
        ({"input": [{"type": ["message"]}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "arguments"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 10**6}, "context"),
        ({"n": 2}, "'n'"),
    ],
)
async def test_what_is_not_served_is_named(body: dict[str, Any], named: str) -> None:
    async with serving() as served:
        assert named in (await post(served, 400, **body))["error"]["message"]


async def test_structured_text_and_forced_calls() -> None:
    schema = {"type": "json_schema", "name": "time", "schema": TIME, "strict": True}
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]}
    only["tools"][0]["name"] = "time"  # type: ignore[index]
    async with chatting() as (served, _, _):
        held = await post(served, text={"format": schema}, seed=1)
        for choice in ({"type": "function", "name": "time"}, only):
            body = {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False}
            (call,) = (await post(served, **body, seed=2))["output"]
            jsonschema.validate(json.loads(call["arguments"]), TIME)
            assert (call["name"], call["status"]) == ("time", "completed")
    jsonschema.validate(json.loads(held["output"][0]["content"][0]["text"]), TIME)


@pytest.mark.parametrize(
    ("ending", "end", "status"),
    [
        ("drain", "response.failed", "failed"),
        ("deadline", "response.incomplete", "incomplete"),
        ("cancel", "response.incomplete", "cancelled"),
        ("failure", "response.failed", "failed"),
        ("failure before text", "response.failed", "failed"),
    ],
)
def test_a_stream_that_is_ended_has_one_end(ending: str, end: str, status: str) -> None:
    # "ð" stands for the first byte of four, which has no text yet.
    token = small_tokenizer().token_to_id("ð" if ending == "failure before text" else "a")
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, next_token=lambda _: token)
    with live(runner, drain_timeout=0.01) as served, served.http() as client:
        runner.hold()
        runner.allow(3)
        body = {"input": "a", "stream": True, "ignore_eos": True, "max_output_tokens": 1500}
        with client.stream("POST", "/v1/responses", json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            response_id = parsed(text.partition("\n\n")[0])[0]["response"]["id"]
            running = client.get(f"/v1/responses/{response_id}").json()
            assert running["status"] == "in_progress"
            engine = served.service.engine
            abort = engine.abort

            def aborting(*arguments: Any) -> None:
                abort(*arguments)
                runner.release()

            engine.abort = aborting  # type: ignore[assignment,method-assign]
            if ending == "drain":
                asyncio.run_coroutine_threadsafe(served.service.drain(), served.loop)
            elif ending == "deadline":
                ids = [sequence.id for sequence in engine.sequences]
                served.loop.call_soon_threadsafe(engine.abort, ids, FinishReason.TIMEOUT)
            elif ending == "cancel":
                cancelled = client.post(f"/v1/responses/{response_id}/cancel").json()
                assert cancelled["status"] == "cancelled"
            else:
                runner.wait_until_held()
                runner.fail()
            text += "".join(pieces)
        events = parsed(text)
        output = assembled(events)
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == (end, status)
        assert last["response"]["output"] == output
        statuses = [item["status"] for item in output]
        assert statuses == ([] if ending == "failure before text" else ["incomplete"])
        assert (last["response"]["error"] is None) == (status != "failed")
        if ending == "cancel":
            again = client.post(f"/v1/responses/{response_id}/cancel").json()
            assert again == last["response"]


def test_a_client_that_leaves_ends_the_response() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000)
    with live(runner) as served, served.http() as client:
        body = {"input": "a", "stream": True, "ignore_eos": True, "max_output_tokens": 1500}
        runner.hold()
        runner.allow(3)
        with client.stream("POST", "/v1/responses", json=body) as response:
            response_id = parsed(next(response.iter_text()).partition("\n\n")[0])[0]["response"]
        assert served.left.acquire(timeout=TIMEOUT)
        runner.release()
        assert served.freed.acquire(timeout=TIMEOUT)
        gone = client.get(f"/v1/responses/{response_id['id']}")
        assert gone.status_code == 404


async def test_errors_of_length_name_the_field_of_this_route() -> None:
    async with serving() as served:

        async def refused(**body: int) -> dict[str, Any]:
            response = await served.client.post("/v1/responses", json={"input": "a", **body})
            assert response.status_code == 400
            error: dict[str, Any] = response.json()["error"]
            return error

        endless = {"input": "a", "max_output_tokens": -1}
        assert (await served.client.post("/v1/responses", json=endless)).status_code == 200
        assert (await refused(max_output_tokens=10**6))["param"] == "max_output_tokens"
        assert (await refused(max_output_tokens=0))["param"] == "max_output_tokens"
        assert "use max_output_tokens" in (await refused(max_tokens=5))["message"]
