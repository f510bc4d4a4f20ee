"""Files and batches over HTTP: what a client sends, gets, and may not do."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.responses import FileResponse

from kvasir.server.batches.objects import BatchUsage
from tests.kit.chats import LONG, THINKING, with_template
from tests.kit.dialects import CHAT, MESSAGES, RESPONSES, post
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, Served, serving

ENDPOINT = "/v1/completions"
Fields = dict[str, Any]


def line(custom_id: str, *, url: str = ENDPOINT, **body: Any) -> Fields:
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(
        (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines
    )


@asynccontextmanager
async def batching(tmp_path: Path, **settings: Any) -> AsyncIterator[Served]:
    runner = FakeRunner(VOCAB_SIZE, max_model_len=256)
    async with serving(runner, batch_dir=tmp_path / "batches", **settings) as served:
        yield served


async def upload(served: Served, content: bytes, key: str | None = None) -> Fields:
    response = await served.client.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("requests.jsonl", content)},
        headers={} if key is None else {"x-api-key": key},
    )
    assert response.status_code == 200, response.text
    found: Fields = response.json()
    return found


def asked(file_id: str, **change: Any) -> Fields:
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    return body | change


async def begin(served: Served, file_id: str, endpoint: str = ENDPOINT) -> Fields:
    body = asked(file_id, endpoint=endpoint, metadata={"a": "b"})
    response = await served.client.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    found: Fields = response.json()
    return found


async def ended(served: Served, batch: Fields) -> Fields:
    """Wait for the batch's task; return the batch."""
    worker = served.app.state.batches
    if batch["id"] in worker.tasks:
        await worker.tasks[batch["id"]]
    response = await served.client.get(f"/v1/batches/{batch['id']}")
    found: Fields = response.json()
    return found


async def answers(served: Served, file_id: str | None) -> dict[str, Fields]:
    """Return a file's lines by custom id; each is there once."""
    if file_id is None:
        return {}
    response = await served.client.get(f"/v1/files/{file_id}/content")
    lines = [json.loads(one) for one in response.text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_batch_answers_each_line_as_the_route_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    if is_long:  # of an answer too long to be parsed, the usage is known
        monkeypatch.setattr("kvasir.server.api.openai.batches._LONG", 0)
    async with batching(tmp_path) as served:
        good = [line(str(i), prompt="abc"[: 1 + i % 3], seed=i) for i in range(9)]
        wrong = [line("cold", temperature=-1), line("long", max_tokens=10**6)]
        file = await upload(served, jsonl([*good[:5], *wrong, *good[5:]]))
        fields = {"object": "file", "filename": "requests.jsonl", "purpose": "batch"}
        nothing = {"expires_at": None, "status": "processed", "status_details": None}
        assert file == file | fields | nothing
        assert file.keys() == {"id", "bytes", "created_at", *fields, *nothing}
        begun = await begin(served, file["id"])
        assert (begun["status"], begun["metadata"]) == ("validating", {"a": "b"})
        assert "owner" not in begun
        batch = await ended(served, begun)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 11, "completed": 9, "failed": 2}
        found = await answers(served, batch["output_file_id"])
        n_tokens = 0
        for one in good:
            direct = (await served.client.post(ENDPOINT, json=one["body"])).json()
            response = found[one["custom_id"]]["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"] == direct["choices"]
            n_tokens += direct["usage"]["total_tokens"]
        assert batch["usage"]["total_tokens"] == n_tokens
        failures = await answers(served, batch["error_file_id"])
        for one in wrong:
            refused = await served.client.post(ENDPOINT, json=one["body"])
            response = failures[one["custom_id"]]["response"]
            assert response["body"] == refused.json()
            assert response["status_code"] == 400
        assert served.app.state.batches.n_pending == 0
        metrics = (await served.client.get("/metrics")).text
        shown = dict(one.rsplit(" ", 1) for one in metrics.splitlines() if one[0] != "#")
        assert float(shown["kvasir_batch_last_answer_timestamp_seconds"]) > begun["created_at"] - 1
        assert float(shown["kvasir_batch_dir_limit_bytes"]) == 2 * 2**30
        zeros = ["batches_waiting_for_room", 'batches_unfinished{status="in_progress"}']
        assert {shown[f"kvasir_{one}"] for one in zeros} == {"0.0"}


WRONG_LINES: list[tuple[Any, str | None]] = [
    (b"{", "invalid_json_line"),
    (b"[]", "invalid_json_line"),
    (b'{"custom_id": "x", "body": NaN}', "invalid_json_line"),
    ({"custom_id": "x", "method": "POST", "url": ENDPOINT}, "missing_required_parameter"),
    (line("x") | {"more": 1}, "unknown_parameter"),
    (line(""), "invalid_custom_id"),
    (line("0"), "duplicate_custom_id"),
    (line("x") | {"method": "GET"}, "invalid_method"),
    (line("x", url="/v1/embeddings"), "mismatched_endpoint"),
    (line("x") | {"body": "a"}, "invalid_body"),
    (line("x", stream=True), "invalid_body"),
    (line("x", prompt="a" * 3000), "line_too_long"),
    (b" ", None),
]


async def test_a_line_that_is_no_request_fails_the_batch(tmp_path: Path) -> None:
    async with batching(tmp_path, max_body_bytes=2000) as served:
        for bad, code in WRONG_LINES:
            file = await upload(served, jsonl([line("0"), bad, line("1")]))
            batch = await ended(served, await begin(served, file["id"]))
            assert batch["status"] == ("failed" if code else "completed"), bad
            faults = batch["errors"]["data"] if code else []
            assert [(one["code"], one["line"]) for one in faults] == [(code, 2)][: len(faults)]
            assert (batch["output_file_id"] is None) is bool(code), bad
            assert bool(faults) is bool(code)


async def test_a_cancelled_batch_answers_the_rest_with_errors(tmp_path: Path) -> None:
    async with batching(tmp_path) as served:
        served.runner.hold()
        file = await upload(served, jsonl([line(str(i)) for i in range(9)]))
        batch = await begin(served, file["id"])
        await served.submitted.acquire()
        kept = await served.client.delete(f"/v1/files/{file['id']}")
        assert kept.status_code == 409
        cancelled = await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert cancelled.json()["status"] == "cancelling"
        served.runner.release()
        batch = await ended(served, batch)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"]["total"] == 9
        output = await answers(served, batch["output_file_id"])
        failures = await answers(served, batch["error_file_id"])
        assert output.keys() | failures.keys() == set(map(str, range(9)))
        assert {one["error"]["code"] for one in failures.values()} == {"batch_cancelled"}
        again = await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code == 409
        gone = await served.client.delete(f"/v1/files/{file['id']}")
        assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
        assert (await served.client.get(f"/v1/files/{file['id']}")).status_code == 404


async def test_lists_have_pages_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.server.batches.store.MAX_BATCHES", 3)
    async with batching(tmp_path) as served:
        files = [(await upload(served, jsonl([line("0")])))["id"] for _ in range(4)]

        async def ids(path: str, **query: Any) -> list[str]:
            response = await served.client.get(path, params=query)
            found = response.json()
            listed = [one["id"] for one in found["data"]]
            assert (found["first_id"], found["last_id"]) == (listed[0], listed[-1])
            assert found["has_more"] is (len(listed) == query.get("limit"))
            return listed

        assert await ids("/v1/files") == files[::-1]
        assert await ids("/v1/files", order="asc", limit=2) == files[:2]
        assert await ids("/v1/files", order="asc", after=files[1]) == files[2:]
        batches = [await ended(served, await begin(served, one)) for one in files]
        assert await ids("/v1/batches") == [one["id"] for one in batches[:0:-1]]  # one forgotten
        assert len(await ids("/v1/files", purpose="batch_output")) == 4
        for path, query in ("/v1/files", "limit=0"), ("/v1/batches", "limit=x"):
            assert (await served.client.get(f"{path}?{query}")).status_code == 400
        assert (await served.client.get("/v1/files?after=x")).status_code == 404


async def test_lists_and_contents_are_whole_beside_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delete a file once its content's answer begins, and end a batch while files are listed."""
    async with batching(tmp_path) as served:
        file = await upload(served, jsonl([line("0")]))
        store, call = served.app.state.batches.store, FileResponse.__call__

        async def deleting(*arguments: Any) -> None:
            store.delete(store.files[file["id"]])
            await call(*arguments)

        monkeypatch.setattr(FileResponse, "__call__", deleting)
        assert (await answers(served, file["id"])).keys() == {"0"}

        class Growing(Mock):
            @property
            def owner(self) -> str:
                store.files[f"more-{len(store.files)}"] = Mock(owner="another")
                return "another"

        store.files["first"] = Growing()
        assert (await served.client.get("/v1/files")).json()["data"] == []


async def test_files_and_batches_belong_to_a_named_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("name=ann ann-key\nname=bob bob-key\nnameless\n", encoding="utf-8")
    async with batching(tmp_path, api_key_file=keys) as served:
        file = await upload(served, jsonl([line("0")]), key="ann-key")
        served.client.headers["x-api-key"] = "bob-key"
        for path in ("", "/content"):
            assert (await served.client.get(f"/v1/files/{file['id']}{path}")).status_code == 404
        assert (await served.client.delete(f"/v1/files/{file['id']}")).status_code == 404
        assert (await served.client.get("/v1/files")).json()["data"] == []
        begun = await served.client.post("/v1/batches", json=asked(file["id"]))
        assert begun.status_code == 404
        served.client.headers["x-api-key"] = "nameless"
        assert (await served.client.get("/v1/files")).status_code == 400
        served.client.headers["x-api-key"] = "ann-key"
        batch = await ended(served, await begin(served, file["id"]))
        assert batch["status"] == "completed"


async def test_the_usage_of_each_dialect_counts_alike() -> None:
    """Anthropic's input tokens leave out those that the prefix cache held."""
    runner = FakeRunner(VOCAB_SIZE, max_model_len=LONG)
    thinking = with_template(THINKING.replace("{% elif deep %}", "{% else %}"))
    async with serving(runner, cache_bytes=2**20, model_dir=thinking) as served:
        used = {}
        for path, length in (
            (CHAT, "max_tokens"),
            (MESSAGES, "max_tokens"),
            (RESPONSES, "max_output_tokens"),
        ):
            for _ in range(2):
                answer = await post(served, path, **{length: 4, "seed": 1, "ignore_eos": True})
            used[path] = BatchUsage()
            used[path].add(answer)
    assert used[CHAT] == used[MESSAGES] == used[RESPONSES]
    assert used[CHAT].input_tokens_details.cached_tokens > 0
    assert used[CHAT].output_tokens_details.reasoning_tokens == 4


BOUNDARY = "cut"
HEAD = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, content: str, filename: str = "") -> str:
    extra = f'; filename="{filename}"' if filename else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return f"{head}{content}\r\n"


PURPOSE, FILE = part("purpose", "batch"), part("file", "{}", "a.jsonl")
END = f"--{BOUNDARY}--\r\n"


UPLOADS: list[tuple[str, int]] = [
    (PURPOSE + FILE + END, 200),
    (FILE + PURPOSE + END, 200),
    (PURPOSE + FILE, 400),
    (PURPOSE + END, 400),
    (FILE + END, 400),
    (part("purpose", "vision") + FILE + END, 400),
    (PURPOSE + part("file", "", "a") + END, 400),
    (PURPOSE + FILE + FILE + END, 400),
    (PURPOSE + PURPOSE + FILE + END, 400),
    (part("expires_after[seconds]", "3600") + PURPOSE + FILE + END, 400),
    (part("purpose", "batch" * 200) + FILE + END, 400),
    ("nothing", 400),
    ("", 400),
    (PURPOSE + part("file", "a" * 30_000, "a") + END, 413),
]


async def test_uploads_leave_nothing_behind_unless_whole(tmp_path: Path) -> None:
    async with batching(tmp_path, batch_dir_bytes=20_000) as served:
        store = served.app.state.batches.store
        for body, status in UPLOADS:
            response = await served.client.post("/v1/files", content=body.encode(), headers=HEAD)
            assert response.status_code == status, response.text
            kept = list((tmp_path / "batches/files").iterdir())
            assert len(kept) == (2 if status == 200 else 0), body
            assert (store.n_bytes == 0) is (status != 200)
            if status == 200:
                assert response.json()["bytes"] == 2
                await served.client.delete(f"/v1/files/{response.json()['id']}")
        plain = await served.client.post("/v1/files", json={})
        assert plain.status_code == 400
        long = {"content-type": HEAD["content-type"] + "t" * 300}
        cut = await served.client.post("/v1/files", content=UPLOADS[0][0], headers=long)
        assert cut.status_code == 400


async def test_an_upload_without_room_is_refused_before_it_is_received(tmp_path: Path) -> None:
    """Whether the room is used by files, or by another upload that says how long it will be."""
    n_read, held, ends = [0, 0], asyncio.Event(), asyncio.Event()

    async def pieces(number: int) -> AsyncIterator[bytes]:
        yield (PURPOSE + FILE[:-4]).encode()
        n_read[number] += 1
        if number == 0:
            held.set()
            await ends.wait()
        yield b" " * 300_000
        n_read[number] += 1
        yield f"\r\n{END}".encode()

    async with batching(tmp_path, batch_dir_bytes=500_000) as served:
        length = len(PURPOSE + FILE[:-4]) + 300_002 + len(END)
        head = HEAD | {"content-length": str(length)}
        first = asyncio.create_task(
            served.client.post("/v1/files", content=pieces(0), headers=head)
        )
        await held.wait()
        for _ in range(2):
            refused = await served.client.post("/v1/files", content=pieces(1), headers=head)
            assert refused.status_code == 413
            assert "left for you (setting batch_dir_bytes)" in refused.json()["error"]["message"]
            assert n_read[1] == 0
            ends.set()
            assert (await first).status_code == 200
        kept = list((tmp_path / "batches/files").iterdir())
        assert len(kept) == 2
        assert served.app.state.batches.store.n_bytes == 300_000 + 4096


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_waits_for_room_for_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr("kvasir.server.batches.worker._PAUSE", 0)
    async with batching(tmp_path, batch_dir_bytes=32_000) as served:
        loop, waiting = asyncio.get_running_loop(), asyncio.Event()
        store = served.app.state.batches.store
        has_room, errors = store.has_room, iter([OSError(errno.EIO, os.strerror(errno.EIO))])

        def ask(*arguments: Any) -> bool:
            for error in errors:
                raise error
            loop.call_soon_threadsafe(waiting.set)
            return bool(has_room(*arguments))

        monkeypatch.setattr(store, "has_room", ask)
        other = await upload(served, b"a" * 6000)
        file = await upload(served, jsonl([line(str(i)) for i in range(30)]))
        batch = await begin(served, file["id"])
        await waiting.wait()
        found = (await served.client.get(f"/v1/batches/{batch['id']}")).json()
        assert found["status"] == "in_progress"
        assert found["errors"]["data"][0]["code"] == "storage_full"
        assert "kvasir_batches_waiting_for_room 1.0" in (await served.client.get("/metrics")).text
        if is_cancelled:
            await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        else:
            await served.client.delete(f"/v1/files/{other['id']}")
        batch = await ended(served, batch)
        assert batch["status"] == ("cancelled" if is_cancelled else "completed")
        assert (batch["errors"] is None) is not is_cancelled
        found = await answers(served, batch["output_file_id"])
        assert 0 < len(found) <= 30
        assert is_cancelled or len(found) == 30
        assert (await served.client.delete(f"/v1/files/{file['id']}")).status_code == 200


async def test_a_full_disk_is_507_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batching(tmp_path) as served:
        file = await upload(served, jsonl([line("0")]))
        before = sorted((tmp_path / "batches").rglob("*"))
        n_bytes = served.app.state.batches.store.n_bytes
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
        for response in (
            await served.client.post("/v1/files", content=PURPOSE + FILE + END, headers=HEAD),
            await served.client.post("/v1/batches", json=asked(file["id"])),
        ):
            assert response.status_code == 507
            assert "disk is full" in response.json()["error"]["message"]
        assert sorted((tmp_path / "batches").rglob("*")) == before
        assert served.app.state.batches.store.n_bytes == n_bytes
        assert (await served.client.get("/v1/batches")).json()["data"] == []


async def test_responses_of_a_batch_are_kept_only_if_it_says_so(tmp_path: Path) -> None:
    async with batching(tmp_path) as served:
        url = "/v1/responses"
        lines = [line(str(i), url=url) | {"body": {"input": "a"}} for i in range(3)]
        lines[1]["body"]["store"] = True
        file = await upload(served, jsonl(lines))
        batch = await ended(served, await begin(served, file["id"], url))
        found = await answers(served, batch["output_file_id"])
        kept = {name: one["response"]["body"]["store"] for name, one in found.items()}
        assert kept == {"0": False, "1": True, "2": False}
        assert len(served.app.state.response_store.state.responses) == 1


async def test_without_a_folder_the_paths_name_the_setting() -> None:
    async with serving() as served:
        for method in ("get", "post", "delete"):
            response = await served.client.request(method, "/v1/files/x")
            assert response.status_code == 404
            assert "batch_dir" in response.json()["error"]["message"]


async def test_what_a_batch_cannot_be_is_refused(tmp_path: Path) -> None:
    changes: list[Fields] = [
        {"endpoint": "/v1/models"},
        {"endpoint": "/v1/batches"},
        {"completion_window": "1h"},
        {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
        {"metadata": {"a": 1}},
    ]
    async with batching(tmp_path) as served:
        file = await upload(served, jsonl([line("0")]))
        for change in changes:
            response = await served.client.post("/v1/batches", json=asked(file["id"], **change))
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith(next(iter(change)))
