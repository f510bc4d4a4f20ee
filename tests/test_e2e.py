"""Clients that leave, or do not read, and an engine that fails, over real sockets.

What clients get from a server that works is in tests/conformance.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.kit.fake_runner import FakeRunner
from tests.kit.live import live, wait
from tests.kit.serving import MODEL, VOCAB_SIZE


def test_a_failed_engine_is_an_error_of_the_openai_client() -> None:
    """In mid-stream, and for a request that comes later."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 9}
    with live() as served, served.client() as client:
        served.runner.hold()
        served.runner.allow(1)
        stream = client.completions.create(**body, stream=True, logit_bias={"66": 100})
        next(stream)
        served.runner.error = RuntimeError("gone")
        served.runner.release()
        with pytest.raises(openai.APIError, match="engine failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**body)
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.keys() == {"message", "type", "param", "code"}


def test_a_request_cancelled_in_the_queue_never_runs() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    runner.hold()
    with live(runner) as served, served.post_raw(max_tokens=3) as first:
        wait(served.submitted)
        served.runner.wait_until_held()
        second = served.post_raw(max_tokens=30, stream=True)
        wait(served.submitted)
        second.close()
        wait(served.left)
        served.runner.release()
        assert first.recv(16).startswith(b"HTTP/1.1 200")
    assert served.value("request_success_total", finished_reason="abort") == 1
    assert served.value("generation_tokens_total") == 3
    assert served.model.admission.n_inside == 0


GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("stream", "more"), [(True, b""), (True, GET), (True, b"\0\r\n\r\n"), (False, b"")]
)
def test_a_cancelled_request_frees_its_slot_within_one_step(
    stream: bool, more: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a client that has sent more than its request: its next one, or what is none.

    Nothing more is read, so only writing shows the end.
    """
    monkeypatch.setattr("kvasir.server.api.http.streams.KEEP_ALIVE_SECONDS", 0.05)  # written to it
    with live(FakeRunner(VOCAB_SIZE, max_num_seqs=1)) as served:
        served.runner.hold()
        leaving = served.post_raw(max_tokens=50, stream=stream)
        served.runner.allow(2)
        wait(served.submitted)
        served.runner.wait_until_held()
        if stream:
            assert leaving.recv(4096).startswith(b"HTTP/1.1 200")
        leaving.sendall(more)
        leaving.close()
        wait(served.left)
        served.runner.allow(1)
        wait(served.freed)
        assert len(served.runner.batches) == 3
        with served.http() as client:
            served.runner.release()
            body = {"prompt": "a", "max_tokens": 1, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
    assert served.value("request_success_total", finished_reason="abort") == 1
    assert 2 <= served.value("tokens_wasted_total") <= 3
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_queued_request_whose_status_is_not_known_yet_is_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.server.api.http.streams.KEEP_ALIVE_SECONDS", 0.001)
    with live(FakeRunner(VOCAB_SIZE, max_num_seqs=1)) as served:
        served.runner.hold()
        with served.post_raw(max_tokens=2, stream=True) as waiting, served.http() as client:
            wait(served.submitted)
            assert client.get("/health/ready").status_code == 200
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.recv(1)


def test_a_slow_reader_does_not_hold_up_the_others() -> None:
    with (
        live(FakeRunner(VOCAB_SIZE, max_model_len=600)) as served,
        served.post_raw(max_tokens=500, stream=True),
    ):
        wait(served.submitted)
        with served.http() as client, ThreadPoolExecutor(4) as pool:
            body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
            answers: list[Future[httpx.Response]] = [
                pool.submit(client.post, "/v1/completions", json=body) for _ in range(4)
            ]
            assert [answer.result().status_code for answer in answers] == [200] * 4


LARGE = "x" * 100_000  # as the model's name, makes every event too large for the buffers on the way


def test_a_client_that_stops_reading_frees_its_slots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=2)
    with live(runner, max_queue=0, send_timeout=0.05, served_model_name=LARGE) as served:
        served.runner.hold()
        with (
            served.post_raw(max_tokens=60, stream=True, n=2, ignore_eos=True),
            served.http() as client,
        ):
            wait(served.submitted)
            served.runner.allow(40)  # more than the connection takes, less than it asked for
            wait(served.left)
            served.runner.release()
            wait(served.freed)
            wait(served.freed)
            again = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 2})
            assert again.status_code == 200
    assert served.value("request_success_total", finished_reason="abort") == 2
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == [
        "cut off a client that does not read"
    ]


def test_a_client_that_stops_reading_once_all_is_generated_frees_its_slot_too() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    settings: dict[str, Any] = {"max_queue": 0, "send_timeout": 0.05, "served_model_name": LARGE}
    with (
        live(runner, **settings) as served,
        served.post_raw(max_tokens=60, stream=True, ignore_eos=True),
    ):
        wait(served.left)
        with served.http() as client:
            again = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert again.status_code == 200
