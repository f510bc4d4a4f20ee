"""The middleware: ids, keys and their limits, CORS, the limit on bodies, the log."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import tracemalloc
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from kvasir.server.api.http.keys import ApiKeys
from kvasir.server.api.http.pieces import unless_disconnected
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.errors import InvalidRequestError, OverloadedError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.requests.admission.queue import Phase
from kvasir.server.requests.builder import RequestOptions
from kvasir.server.requests.completion import RequestState
from kvasir.server.requests.text_worker import THREADS
from tests.kit.fake_runner import TIMEOUT
from tests.kit.serving import RawRequest, Served, sample, serving

HEALTH = ("/health", "/health/live", "/health/ready", "/health/startup")
PROBED = (*HEALTH, "/metrics", "/metrics/router")


async def test_the_callers_request_id_comes_back_or_a_new_one() -> None:
    fit = (b"abc-123", b"x" * 128, b"with space", b'"}{')
    unfit = (b"", b"x" * 129, b"tab\there", b"h\xe9", b"\x7f")
    async with serving() as served:
        ids = []
        for given in (*fit, *unfit):
            headers = {b"x-request-id": given}
            body = {"prompt": "a", "max_tokens": 1}
            answer = await served.client.post("/v1/completions", json=body, headers=headers)
            ids.append(answer.headers["x-request-id"])
            assert answer.json()["id"] == f"cmpl-{ids[-1]}"
    assert [one.encode() for one in ids[:4]] == [*fit]
    assert len(set(ids)) == 9
    assert all(one.isalnum() for one in ids[4:])


KEYS: list[tuple[int, Any]] = [
    *[(200, [("authorization", one)]) for one in ("Bearer one", "bearer one", "Bearer  one ")],
    (200, [("x-api-key", "one")]),
    (200, [("authorization", "Basic proxy"), ("x-api-key", "one")]),
    (401, []),
    *[(401, [("authorization", one)]) for one in ("", "one", "Bearer", "Bearer wrong")],
    *[(401, [("authorization", one)]) for one in ("Bearer one2", "Basic one")],
    (401, [(b"authorization", b"Bearer \xfcber")]),
    *[(401, [("x-api-key", one)]) for one in ("two", "")],
    (401, [("authorization", "Bearer two"), ("x-api-key", "one")]),
]


async def test_without_a_valid_key_only_health_and_metrics_answer() -> None:
    async with serving(api_key="one") as served:
        get = served.client.get
        for status, headers in KEYS:
            assert (await get("/v1/models", headers=headers)).status_code == status, headers
            for path in ("/nothing", "/healthy", "/metrics/", "/health/live/x"):
                response = await get(path, headers=headers)
                assert response.status_code == (404 if status == 200 else 401), headers
                challenge = response.headers.get("www-authenticate")
                assert challenge == (None if status == 200 else "Bearer")
        for path in PROBED:
            assert (await get(path)).status_code == 200
        refused = await served.client.post("/", json={"inputs": "a"})  # GET shows the page to all
        assert (refused.status_code, refused.json().keys()) == (401, {"error", "error_type"})


EVIL = {"host": "evil.example", "origin": "https://evil.example"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


CROSS = {"sec-fetch-site": "cross-site"}
NAMES: list[tuple[dict[str, Any], list[tuple[str, dict[str, str], int]]]] = [
    (
        {},
        [
            *[(path, EVIL | LINK, 200) for path in PROBED],
            ("/", LINK, 200),  # a link may open the page
            ("/", EVIL, 403),
            ("/version", LINK, 403),
        ],
    ),
    ({"api_key": "one"}, [("/version", {"host": "any.example", "x-api-key": "one"}, 200)]),
    ({"allowed_hosts": "*"}, [("/version", {"host": "any.example"}, 200)]),
    ({"host": "Llm.lan"}, [("/version", {"host": "llm.LAN:8000"}, 200)]),
    (
        {"cors_origins": "*"},
        [("/version", CROSS | {"origin": one}, 200) for one in ("null", "https://evil.example")],
    ),
    (
        {"host": ""},  # an empty name to listen on is no pattern
        [
            ("/version", {"host": "evil.example"}, 403),
            *[("/version", {"host": name}, 200) for name in ("", ".", "localhost")],
        ],
    ),
]


async def test_names_and_origins_that_no_page_should_use_are_refused() -> None:
    for settings, asked in NAMES:
        async with serving(**settings) as served:
            for path, headers, status in asked:
                answer = await served.client.get(path, headers=headers)
                assert answer.status_code == status, (settings, path, headers)
                if status == 403:
                    setting = "allowed_hosts" if "host" in headers else "cors_origins"
                    assert setting in answer.text


def complete(served: Served, key: str, **fields: object) -> asyncio.Task[httpx.Response]:
    body = {"prompt": "a"} | fields
    return asyncio.create_task(
        served.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_each_key_has_so_many_requests_in_flight(tmp_path: Path, stream: bool) -> None:
    """A place is free again after an answer, an error, or a client's disconnect."""
    path = tmp_path / "keys"
    path.write_text("* concurrency=2\none\ntwo\n")
    async with serving(api_key_file=path) as served:
        served.runner.hold()
        running = [complete(served, key, stream=stream) for key in ("one", "one", "two")]
        for _ in running:
            await served.submitted.acquire()
        refused = await complete(served, "one")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert "2 requests with this API key" in refused.json()["error"]["message"]
        assert "one" not in refused.json()["error"]["message"].replace("one to end", "")
        assert (await complete(served, "two", top_p=7)).status_code == 400
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        running[0] = complete(served, "one")
        await served.submitted.acquire()
        served.runner.release()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200] * 3
        for _ in range(5):
            assert (await complete(served, "one")).status_code == 200
        rejected = sample(served.model.metrics, "requests_rejected_total", reason="overloaded_key")
    assert rejected == 1


async def test_texts_to_tokenise_take_places_of_their_key_and_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("concurrency=1 tokens_per_minute=1 one\n")
    go, text = threading.Event(), "a" * 5000
    async with serving(api_key_file=path) as served:

        def post(path: str, **body: object) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": "Bearer one"}
            return asyncio.create_task(served.client.post(path, json=body, headers=headers))

        for _ in range(THREADS):
            served.model.text_worker.submit(go.wait, TIMEOUT)
        first = post("/tokenize", prompt=text)
        others = [await post("/tokenize", prompt=text), await post("/detokenize", tokens=[1])]
        go.set()
        assert [one.status_code for one in (await first, *others)] == [200, 429, 429]
        assert (await post("/detokenize", tokens=[1] * 5000)).status_code == 200
        assert (await post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200


async def test_what_a_request_does_not_use_of_its_max_tokens_is_given_back(tmp_path: Path) -> None:
    """Its reservation holds back the same key alone, and ends with it, whatever its end."""
    path = tmp_path / "keys"
    path.write_text("tokens_per_minute=6 one\ntokens_per_minute=6 two\n")
    stop = {"max_tokens": 40, "stop_token_ids": [*range(300)]}
    async with serving(api_key_file=path) as served:
        assert (await complete(served, "one", **stop)).status_code == 200
        served.runner.hold()
        running = complete(served, "one", max_tokens=40)
        await served.submitted.acquire()
        refused = await complete(served, "one")
        assert refused.status_code == 429
        assert "6 tokens a minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 400
        other = complete(served, "two")
        await served.submitted.acquire()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        last = complete(served, "one", max_tokens=1)
        await served.submitted.acquire()
        served.runner.release()
        assert [one.status_code for one in await asyncio.gather(other, last)] == [200, 200]


async def test_a_client_that_does_not_read_uses_its_tokens_all_the_same() -> None:
    async with serving(api_key="one") as served:
        state = RequestState("mine", 0.0, await ApiKeys("one").find(b"one") or Caller())
        state.caller.tokens_per_minute = 2
        builder, params = served.model.builder, SamplingParams(max_tokens=0, ignore_eos=True)
        options = RequestOptions(
            prompts=[[5] * 3], params=params, max_tokens=30, default_max_tokens=30, seed=1
        )
        async with served.model.complete(await builder.build(options, state)) as completion:
            while completion.stream.n_generated < 30:
                await completion.stream.receive()
        assert completion.n_completion_tokens == 0
        with pytest.raises(OverloadedError, match="2 tokens a minute"):
            async with state.caller.tokens(1):
                pass


async def test_pages_of_other_origins_are_served_only_where_that_is_set() -> None:
    origin, key = {"origin": "https://a.example"}, {"authorization": "Bearer one"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-any",
    }
    path = "/v1/completions"
    async with serving(api_key="one") as served:
        asked = await served.client.options(path, headers=origin | preflight)
        health = await served.client.get("/health", headers=origin)
    names = {*asked.headers, *health.headers}
    assert (asked.status_code, any(one.startswith("access-control") for one in names)) == (
        401,
        False,
    )
    async with serving(api_key="one", cors_origins="https://a.example,https://b.example") as served:
        asked = await served.client.options(path, headers=origin | preflight)
        stranger = {"origin": "https://c.example"} | preflight
        refused = await served.client.options(path, headers=stranger)
        answers = [
            await served.client.post(path, json=body, headers=origin | headers)
            for headers, body in (({}, {}), (key, {"prompt": 1.5}), (key, {"prompt": "a"}))
        ]
    assert asked.status_code == 200  # without a key: browsers send none
    assert "x-any" in asked.headers["access-control-allow-headers"]
    assert asked.headers["x-request-id"]
    assert "access-control-allow-origin" not in refused.headers
    assert [answer.status_code for answer in answers] == [401, 400, 200]
    for answer in (asked, *answers):
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    for answer in answers:
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-should-retry", "x-kvasir-scores"} <= set(exposed)


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_a_proxy_may_publish_it_under_a_path(root_path: str) -> None:
    async with serving(api_key="one", root_path=root_path) as served:
        assert (await served.client.get(f"{root_path}/health")).status_code == 200
        assert (await served.client.get(f"{root_path}/v1/models")).status_code == 401
        refused = await served.client.post(f"{root_path}/generate", content=b"")
        assert refused.json().keys() == {"error", "error_type"}


async def test_a_large_body_is_refused_announced_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 30

    async with serving(max_body_bytes=100) as served:
        announced = await served.client.post("/v1/completions", content=b" " * 101)
        counted = await served.client.post("/v1/completions", content=chunks())
        fits = await served.client.post("/v1/completions", content=b'{"prompt":"a"}'.ljust(100))
    assert (announced.status_code, counted.status_code, fits.status_code) == (413, 413, 200)
    assert counted.json()["error"]["code"] == "request_too_large"
    assert "100 bytes" in counted.json()["error"]["message"]


async def test_a_body_of_doubtful_length_is_refused() -> None:
    async with serving() as served:
        for header in (("content-length", "0" * 5000), ("transfer-encoding", "gzip, chunked")):
            answer = await served.client.post("/v1/completions", headers=[header])
            assert answer.status_code == 400
            assert header[0] in answer.json()["error"]["message"]


async def test_a_request_is_freed_when_it_is_refused() -> None:
    """A cycle of references would keep its body until garbage is collected."""

    async def answer(request: Request) -> None:
        raise InvalidRequestError(f"{request.url} is wrong")

    async def refused() -> weakref.ref[Request]:
        request = Request({"type": "http", "path": "/", "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
        with suppress(InvalidRequestError):
            await unless_disconnected(request.receive, answer(request))
        return weakref.ref(request)

    gc.disable()
    try:
        held = await refused()
        await asyncio.sleep(0)  # callbacks that are due
        assert held() is None
    finally:
        gc.enable()


async def test_one_log_line_for_each_request_without_its_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kvasir")
    async with serving() as served:
        body = {
            "prompt": "secret words",
            "max_tokens": 3,
            "n": 2,
            "ignore_eos": True,
            "user": "somebody",
        }
        answer = await served.client.post(
            "/v1/completions?token=hidden", json=body, headers={"x-request-id": "mine"}
        )
        await served.client.get("/nothing")
        for wrong in ({"top_p": 2}, {"a secret as a name": 1}, {"prompt": "secret " * 99}):
            refused = await served.client.post("/v1/completions", json=body | wrong)
            assert refused.status_code == 400
    records = [record for record in caplog.records if record.getMessage() == "request"]
    first, second, *refusals = (
        getattr(record, "fields")  # noqa: B009  set by `extra`
        for record in records
    )
    assert [(one["error"], one.get("param")) for one in refusals] == [
        ("invalid_request_error", "top_p"),
        ("invalid_request_error", None),
        ("context_length_exceeded", "prompt"),
    ]
    assert first["ttft_ms"] <= first["duration_ms"]
    assert first == first | {
        "request_id": "mine",
        "route": "/v1/completions",
        "status": 200,
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "completion_tokens": 6,
        "finish_reason": ["length", "length"],
    }
    assert "key" not in first
    assert (second["status"], second["route"]) == (404, "/nothing")
    shown = str([record.__dict__ for record in caplog.records])
    assert not any(private in shown for private in ("secret", "hidden", "somebody"))


async def test_the_log_names_the_key_and_never_shows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvasir")
    path = tmp_path / "keys"
    path.write_text("name=alice s3cret\n")
    async with serving(api_key_file=path) as served:
        assert (await complete(served, "s3cret", max_tokens=1)).status_code == 200
        assert (await complete(served, "s3cre")).status_code == 401
    fields = [getattr(one, "fields", {}) for one in caplog.records if one.msg == "request"]
    assert [one.get("key") for one in fields] == ["alice", None]
    assert "s3cre" not in str([one.__dict__ for one in caplog.records])


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_probes_and_scrapes_are_in_the_log_where_they_fail_or_at_debug(
    root_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvasir")
    async with serving(root_path=root_path) as served:
        for path in (*PROBED, "/version"):
            assert (await served.client.get(root_path + path)).status_code == 200
        served.model.admission.phase = Phase.LOADING
        assert (await served.client.get(f"{root_path}/health/startup")).status_code == 503
        served.model.admission.phase = Phase.DRAINING
        assert (await served.client.get(f"{root_path}/health/ready")).status_code == 503
    levels = [record.levelno for record in caplog.records if record.getMessage() == "request"]
    assert levels == [logging.DEBUG] * 6 + [logging.INFO, logging.DEBUG, logging.INFO]


async def test_a_bug_is_a_500_with_the_request_id_and_no_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        monkeypatch.setattr(served.model, "complete", None)
        response = await served.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"}
        )
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; request id mine"
    assert "TypeError" in caplog.text


async def test_a_request_that_the_shutdown_cancels_is_logged_as_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as served:
        served.runner.hold()
        caplog.set_level(logging.INFO, "kvasir")
        asked = RawRequest(served.app, "/v1/completions", {"prompt": "a"})
        await served.submitted.acquire()
        asked.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked.task
        assert asked.sent == []
        served.runner.release()
    logged = [vars(record) for record in caplog.records if record.msg == "request"]
    assert [record["fields"]["status"] for record in logged] == [499]


async def test_a_body_in_tiny_pieces_takes_no_more_memory_than_it_has_bytes() -> None:
    """A list of them would take thirty times as much."""
    n = 2**16
    pieces = iter([b'{"prompt": "', *[b"ab"] * n, b'"}'])

    async def receive() -> Any:
        for piece in pieces:
            return {"type": "http.request", "body": bytes([*piece]), "more_body": piece != b'"}'}
        await asyncio.Event().wait()
        raise AssertionError

    async with serving() as served:
        path = "/v1/completions"
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "scheme": "http"}
        scope |= {"headers": [(b"host", b"localhost")], "query_string": b"", "root_path": ""}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        tracemalloc.start()
        await served.app(scope, receive, send)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sent[0]["status"] == 400
    assert peak < 20 * n
