"""OpenAI's package: a file of requests, its batch, its answers."""

from __future__ import annotations

import json
import time

import openai
import pytest

from tests.conformance.server import Calls, Conformed, Server

_N_REQUESTS = 12
_ENDED = ("completed", "failed", "expired", "cancelled")


def use_openai_batches(server: Server) -> Conformed:
    calls = Calls()
    http = openai.DefaultHttpxClient(event_hooks={"request": [calls.note]})
    with openai.OpenAI(base_url=server.openai_url, api_key=server.key, http_client=http) as client:
        _answer(client, server)
        _cancel(client, server)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_none")
        for file in list(client.files.list(limit=2)):
            assert client.files.delete(file.id).deleted
        assert list(client.files.list()) == []
    return Conformed("openai batches", openai.__version__, len(calls))


def _upload(client: openai.OpenAI, server: Server, **body: object) -> str:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
        | {"body": {"model": server.model, "prompt": "def read", "seed": i} | body}
        for i in range(_N_REQUESTS)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert (client.files.retrieve(file.id), file.bytes) == (file, len(content))
    assert client.files.content(file.id).content == content
    return str(file.id)


def _begin(client: openai.OpenAI, file_id: str) -> str:
    batch = client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"of": "tests"},
    )
    assert batch.metadata == {"of": "tests"}
    return str(batch.id)


def _answer(client: openai.OpenAI, server: Server) -> None:
    batch_id = _begin(client, _upload(client, server, max_tokens=4))
    while (batch := client.batches.retrieve(batch_id)).status not in _ENDED:
        time.sleep(0.05)  # as its users do
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == _N_REQUESTS
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(int(one["custom_id"]) for one in answers) == list(range(_N_REQUESTS))
    usages = [one["response"]["body"]["usage"]["total_tokens"] for one in answers]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(usages)
    assert batch in list(client.batches.list(limit=1))


def _cancel(client: openai.OpenAI, server: Server) -> None:
    body = {"max_tokens": server.max_model_len - 100, "ignore_eos": True}
    batch_id = _begin(client, _upload(client, server, **body))
    client.batches.cancel(batch_id)
    while (batch := client.batches.retrieve(batch_id)).status not in _ENDED:
        time.sleep(0.05)
    assert batch.status == "cancelled"
