"""Two servers with one Redis: limits, conversations and streams are those of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.server.errors import StartupError
from kvasir.server.state import link
from tests.kit.chats import chatting
from tests.kit.dialects import RESPONSES, joined, parsed
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.live import KEY, live
from tests.kit.redis_server import RedisServer, needs_redis, redis_server
from tests.kit.serving import VOCAB_SIZE, Served, sample, serving, small_tokenizer

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(link, "_SLICES", 100 * TIMEOUT)  # on a busy machine
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def shared(server: RedisServer, tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "keys"
    keys.write_text("name=a concurrency=3 tokens_per_minute=20 k1\nname=b k2\n")
    return {"api_key_file": keys, "salt": "s" * 16, "state_url": server.url}


async def ask(served: Served, key: str, path: str = RESPONSES, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await served.client.post(path, json=body, headers=headers)


async def read(served: Served, key: str, response_id: str, method: str = "GET") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await served.client.request(method, f"{RESPONSES}/{response_id}", headers=headers)


async def test_a_conversation_goes_on_at_another_replica(shared: dict[str, Any]) -> None:
    async with chatting("Hi.", **shared) as (one, _, prompts), chatting("Hi.", **shared) as two:
        first = (
            await ask(one, "k2", input="Hello?", include=["message.output_text.logprobs"])
        ).json()
        body = {"previous_response_id": first["id"], "input": "And now?", "store": False}
        assert (await ask(two[0], "k2", **body)).json()["status"] == "completed"
        assert (await ask(one, "k2", **body)).json()["status"] == "completed"
        assert two[2] == prompts[-1:]
        assert len(prompts[-1]) > len(prompts[0])
        assert (await read(two[0], "k2", first["id"])).json() == first
        assert (await read(two[0], "k1", first["id"])).status_code == 404
        assert (await read(two[0], "k2", first["id"], "DELETE")).status_code == 200
        assert (await read(one, "k2", first["id"])).status_code == 404


async def test_limits_of_a_key_are_those_of_all_replicas(shared: dict[str, Any]) -> None:
    path, body = "/v1/completions", {"prompt": [5], "ignore_eos": True}
    async with serving(**shared) as one, serving(**shared) as two:
        for served in (one, two):
            served.runner.hold()
        asked = [ask((one, two)[n % 2], "k1", path, **body, max_tokens=1) for n in range(10)]
        answers = asyncio.as_completed(asked, timeout=TIMEOUT)
        refused = [(await next(answers)).status_code for _ in range(7)]
        for served in (one, two):
            served.runner.release()
        assert refused == [429] * 7
        assert [(await answer).status_code for answer in answers] == [200] * 3
        assert (await ask(one, "k1", path, **body, max_tokens=30)).status_code == 200
        for served in (one, two):  # half a minute's tokens are missing
            answer = await ask(served, "k1", path, **body, max_tokens=1)
            assert answer.status_code == 429
            assert "20 tokens a minute" in answer.json()["error"]["message"]
            assert (await ask(served, "k2", path, **body, max_tokens=1)).status_code == 200


def test_a_stream_is_read_and_cancelled_by_way_of_another_replica(server: RedisServer) -> None:
    token = small_tokenizer().token_to_id("a")
    runner = FakeRunner(VOCAB_SIZE, max_model_len=2000, next_token=lambda _: token)
    shared: dict[str, Any] = {"salt": "s" * 16, "state_url": server.url}
    with live(runner, **shared) as served, live(**shared) as other, other.http() as elsewhere:
        runner.hold()
        runner.allow(3)
        body = {"input": "a", "stream": True, "ignore_eos": True, "max_output_tokens": 1500}
        with served.http() as client, client.stream("POST", RESPONSES, json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            (begun,) = parsed(RESPONSES, text.partition("\n\n")[0] + "\n\n")
            path = f"{RESPONSES}/{begun['response']['id']}"
            assert elsewhere.get(path).json()["status"] == "in_progress"
            assert elsewhere.post(f"{path}/cancel").json()["status"] == "cancelled"
            runner.release()
            text += "".join(pieces)
        last = parsed(RESPONSES, text)[-1]["response"]
        assert last["status"] == "cancelled"
        assert last["output"] == joined(RESPONSES, parsed(RESPONSES, text))["output"]
        assert elsewhere.get(path).json() == last
        assert elsewhere.post(f"{path}/cancel").json() == last
        assert KEY not in str(served.model.settings)


async def test_without_redis_what_needs_it_is_refused_and_the_rest_is_served(
    server: RedisServer, shared: dict[str, Any]
) -> None:
    async with chatting("Hi.", **shared) as (one, _, _), chatting("Hi.", **shared) as (two, _, _):
        first = (await ask(one, "k2", input="Hello?")).json()
        assert sample(one.model.metrics, "shared_state_up") == 1
        server.stop()
        try:
            unkept = await ask(one, "k1", input="Hello?", store=False)
            assert unkept.status_code == 200
            assert sample(one.model.metrics, "shared_state_up") == 0
            for refused in (
                await ask(one, "k2", input="Hello?"),
                await ask(one, "k2", input="a", previous_response_id=first["id"], store=False),
                await read(one, "k2", first["id"]),
                await read(one, "k2", first["id"], "DELETE"),
            ):
                assert refused.status_code == 503
                assert "the state that replicas share" in refused.json()["error"]["message"]
                assert refused.headers["retry-after"] == "1"
        finally:
            server.start()
        for served in (one, two):
            await served.app.state.response_store.state._link.found.wait()
            assert (await read(served, "k2", first["id"])).json() == first
        assert sample(one.model.metrics, "shared_state_up") == 1


async def test_keys_without_a_salt_cannot_be_shared(shared: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="state_url needs a salt"):
        async with serving(**shared | {"salt": None}):
            pass


async def test_files_and_batches_are_those_of_all_replicas(
    server: RedisServer, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.server.batches.shared_worker._TICK", 0.01)
    shared |= {"batch_dir": tmp_path / "batches"}
    async with serving(**shared) as one, serving(**shared) as other:

        async def call(served: Served, method: str, path: str, **sent: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {sent.pop('key', 'k2')}"}
            return await served.client.request(method, path, headers=headers, **sent)

        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        content = json.dumps(line | {"body": {"prompt": [5], "max_tokens": 1}})
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a", content)}}
        file = (await call(one, "POST", "/v1/files", **form)).json()
        assert (await call(other, "GET", "/v1/files")).json()["data"] == [file]
        assert (await call(other, "GET", f"/v1/files/{file['id']}/content")).text == content
        for served in (one, other):
            served.runner.hold()
        asked = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        begun = await call(other, "POST", "/v1/batches", json=asked)
        path = f"/v1/batches/{begun.json()['id']}"
        assert (await call(one, "GET", path)).json()["status"] in ("validating", "in_progress")
        assert (await call(one, "GET", "/v1/batches")).json()["first_id"] == begun.json()["id"]
        assert (await call(one, "DELETE", f"/v1/files/{file['id']}")).status_code == 409
        for found in (path, f"/v1/files/{file['id']}"):
            assert (await call(one, "GET", found, key="k1")).status_code == 404
        assert (await call(one, "POST", f"{path}/cancel", key="k1")).status_code == 404
        cancelled = await call(one, "POST", f"{path}/cancel")
        assert cancelled.json()["status"] == "cancelling"
        for served in (one, other):
            served.runner.release()
        while (batch := (await call(one, "GET", path)).json())["status"] == "cancelling":
            await one.app.state.batches._ticked.wait()
        assert batch["status"] == "cancelled"
        assert (await call(one, "POST", f"{path}/cancel")).status_code == 409
        assert (await call(one, "DELETE", f"/v1/files/{file['id']}")).status_code == 200
        assert (await call(other, "GET", f"/v1/files/{file['id']}")).status_code == 404
        server.stop()
        for method, way, sent in (
            *(("GET", "/v1/files", {}), ("GET", path, {}), ("POST", "/v1/files", form)),
            *(("POST", "/v1/batches", {"json": asked}), ("POST", f"{path}/cancel", {})),
        ):
            refused = await call(one, method, way, **sent)
            assert refused.status_code == 503
            assert "cannot be reached" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        server.start()
