"""`prediction` of /v1/chat/completions: what it saves, and how its tokens are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.chats import LONG, chatting, closed
from tests.kit.dialects import CHAT, USER, post, stream
from tests.kit.serving import EOS, small_tokenizer
from tests.kit.serving import sample as value

ANSWER = "def read(path):\n    return open(path).read()\n"
CHANGED = ANSWER.replace("path", "name", 1)


def predicted(content: Any) -> dict[str, Any]:
    return {"messages": USER, "prediction": {"type": "content", "content": content}}


def ids_of(text: str) -> list[int]:
    return small_tokenizer().encode(text).ids


@pytest.mark.parametrize("parts", [False, True])
async def test_a_right_prediction_saves_steps_and_is_counted(parts: bool) -> None:
    content = [{"type": "text", "text": part} for part in (ANSWER[:9], ANSWER[9:])]
    async with chatting(ANSWER, speculate=True) as (served, client, _):
        body = predicted(content if parts else ANSWER)
        answer = await post(served, CHAT, **body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await stream(served, CHAT, **body, stream_options=options)
        two = await post(served, CHAT, **body, n=2)
        whole = await client.chat.completions.create(model="fake-model", **body)
        saved = value(served.model.metrics, "spec_decode_accepted_tokens_total")
    n = len(ids_of(ANSWER))
    assert answer["choices"][0]["message"]["content"] == ANSWER
    details = {"accepted_prediction_tokens": n, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == details
    assert answer["usage"]["completion_tokens"] == n + 1
    assert events[-1]["usage"] == answer["usage"]
    for usage in (event["usage"]["completion_tokens_details"] for event in events):
        assert sum(usage.values()) == n
    assert two["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 2 * n
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == n
    assert saved is not None
    assert saved > 5 * n / 2


async def test_other_predictions_change_nothing_but_their_counts() -> None:
    async with chatting(ANSWER, speculate=True) as (served, _, _):
        plain = await post(served, CHAT, messages=USER)
        answers = [await post(served, CHAT, **predicted(t)) for t in (CHANGED, "(((", "")]
    assert "completion_tokens_details" not in plain["usage"]
    for answer, content in zip(answers, (CHANGED, "(((", ""), strict=True):
        details = answer["usage"].pop("completion_tokens_details")
        assert sum(details.values()) == len(ids_of(content))
        assert (details["accepted_prediction_tokens"] > 5) == (content == CHANGED)
        assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert answer["choices"] == plain["choices"]


async def test_without_drafts_it_is_not_used() -> None:
    unused = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    async with chatting(ANSWER) as (served, _, _):
        answer = await post(served, CHAT, **predicted(ANSWER))
        assert answer["usage"]["completion_tokens_details"] == unused


async def test_a_document_is_edited_under_its_schema() -> None:
    """With and without drafts, though the model would say more than the schema allows."""
    user = closed(name={"type": "string"}, age={"type": "integer"})
    schema = closed(users={"type": "array", "items": user})
    old = json.dumps({"users": [{"name": f"Ann {i}", "age": 30 + i} for i in range(9)]})
    new = old.replace("Ann 3", "Bob").replace("36", "63")
    form = {"type": "json_schema", "json_schema": {"name": "users", "schema": schema}}
    body = predicted(old) | {"response_format": form, "max_tokens": 1000}
    answers, n_runs = [], []
    for speculate in (False, True):
        async with chatting(new + ", and more", speculate=speculate) as (served, _, _):
            answers.append(await post(served, CHAT, **body))
            n_runs.append(len(served.runner.batches))
    details = [answer["usage"].pop("completion_tokens_details") for answer in answers]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]
    assert answers[0]["choices"][0]["message"]["content"] == new
    assert details[1]["accepted_prediction_tokens"] > len(ids_of(old)) - 20
    assert n_runs[1] < n_runs[0] / 3


async def test_a_wrong_prediction_is_refused() -> None:
    wrong = [
        {"type": "content"},
        {"type": "file", "content": "a"},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": "a(" * LONG},
        "a",
    ]
    async with chatting([EOS]) as (served, _, _):
        for prediction in wrong:
            answer = await post(served, CHAT, status=400, prediction=prediction)
            assert answer["error"]["param"].startswith("prediction"), prediction
