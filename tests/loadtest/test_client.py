"""The client parses streams however they are cut, and says why an answer is incomplete."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import closing
from typing import Any

import pytest

from kvasir.loadtest.client import Answer, Client, Target, complete
from tests.kit.fake_completions import DONE, event, fake_completions, usage, well
from tests.kit.fake_runner import TIMEOUT

BODY = b'{"prompt": [1, 2], "max_tokens": 3}'


def ask(url: str, limit: float = TIMEOUT) -> Answer:
    return asyncio.run(complete(Target(url, api_key="secret"), BODY, limit))


def test_figures_follow_their_definitions() -> None:
    answer = Answer(sent=10.0)
    for now, data in [
        (10.5, event("a")),
        (11.0, event("b") + event("")),
        (13.0, event("c") + usage(4, 6)),
        (14.5, DONE),
    ]:
        answer.feed(data, now)
    answer.finish(20.0)
    assert (answer.error, answer.ttft, answer.e2e, answer.tpot) == (None, 0.5, 4.5, 4.0 / 5)
    assert answer.gaps == [0.5, 2.0], "an event without text makes no gap"
    assert (answer.n_tokens, answer.usage) == (
        6,
        {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
    )


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_stream_means_the_same_wherever_it_is_cut(line_end: bytes) -> None:
    """An event arrives with its last byte."""
    first, second = (
        piece.replace(b"\n\n", 2 * line_end)
        for piece in (b": keep-alive\n\n" + event("é\n"), b"event: message\nid: 7\n" + event("b"))
    )
    stream = first + second + usage(2, 2) + DONE
    ends = [len(first) - len(line_end), len(first + second) - len(line_end)]
    for cut in range(len(stream) + 1):
        answer = Answer()
        answer.feed(stream[:cut], 1.0)
        answer.feed(stream[cut:], 2.0)
        answer.finish(2.0)
        assert answer.event_times == [1.0 if cut >= end else 2.0 for end in ends]
        assert (answer.error, answer.n_tokens) == (None, 2), cut


def test_a_chat_holds_its_text_in_deltas() -> None:
    deltas: list[dict[str, str] | None] = [{"role": "assistant"}, {"content": ""}, None]
    answer = Answer()
    for now, delta in enumerate([*deltas, {"content": "a"}, {"content": "b"}]):
        answer.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n", now)
    answer.finish(5.0)
    assert (answer.error, answer.event_times) == (None, [3, 4])


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/completions"])
def test_the_request_has_the_right_path_body_and_key(path: str) -> None:
    with fake_completions(well) as fake:
        assert ask(fake.url + path).n_tokens == 3
    assert (fake.paths, fake.bodies) == (["/v1/completions"], [json.loads(BODY)])
    assert fake.headers[0]["Authorization"] == "Bearer secret"


FULL = [b'{"error": {"message": "the queue is full", ', b'"type": "overloaded"}}']
FAILED = b'data: {"error": {"message": "the engine failed"}}\n\n'


@pytest.mark.parametrize(
    ("status", "pieces", "error"),
    [
        (429, FULL, "HTTP 429: the queue is full"),
        (500, [b"<html>"], "HTTP 500: <html>"),
        (200, [event("a"), FAILED, DONE], "the engine failed"),
        (200, [event("a"), b"data: nonsense\n\n"], "an event is not a completion's: b'nonsense'"),
        (200, [b"data: 7\n\n"], "an event is not a completion's: b'7'"),
        (200, [event(""), usage(2, 3), DONE], "the answer holds no text"),
    ],
)
def test_a_failure_is_the_answers_error(status: int, pieces: list[bytes], error: str) -> None:
    with fake_completions(lambda _: (status, pieces)) as fake:
        assert ask(fake.url).error == error


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = ask(f"http://127.0.0.1:{silent.getsockname()[1]}", limit=0.01)
    assert answer.error == "no whole answer within 0.01 s"


def test_no_server_and_no_url() -> None:
    with socket.socket() as bound:  # but not listening, so its port refuses
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        error = ask(f"http://127.0.0.1:{port}").error
    assert (error or "").startswith(f"no connection to 127.0.0.1:{port}: ")
    with pytest.raises(ValueError, match="'localhost:8000' is not a URL"):
        Target("localhost:8000")


JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
NO_TOKENS = b'{"usage": {"completion_tokens": null}}'
BROKEN = "the connection broke off"
# Bytes before the connection closes; the start of the answer's error, or None; and its tokens.
RESPONSES: list[tuple[bytes, str | None, int]] = [
    (b"", BROKEN, 0),
    (b"HTTP/1.1 200", BROKEN, 0),
    (JSON + b"Content-Length: 99\r\n\r\n{}", BROKEN, 0),
    (JSON + b"Transfer-Encoding: chunked\r\n\r\n1f\r\n{}", BROKEN, 0),
    (STREAM + b"Transfer-Encoding: chunked\r\n\r\nff\r\n" + event("a"), BROKEN, 1),
    (b"220 mail.example\r\n", "the response is not HTTP: ", 0),
    (JSON + b"Content-Length: x\r\n\r\n", "the response is not HTTP: ", 0),
    (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\n\xffbad", "HTTP 503: \ufffdbad", 0),
    (b"HTTP/1.1 503 No\r\n\r\nbusy", "HTTP 503: busy", 0),  # ended by the close, as are these
    (JSON + b"\r\n" + NO_TOKENS, None, 0),
    (STREAM + b"\r\n" + event("a") + event("b") + DONE, None, 2),
    *(
        (JSON + b"\r\n" + body, "the answer is no JSON with usage", 0)
        for body in (b"", b"[]", b"{}", b'{"usage": null}')
    ),
]


@pytest.mark.parametrize(("response", "error", "n_tokens"), RESPONSES)
def test_a_response_ends_in_one_way(response: bytes, error: str | None, n_tokens: int) -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        answered = ask(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(TIMEOUT)
    assert (answered.error or "").startswith(error or "")
    assert (answered.error is None, answered.n_tokens) == (error is None, n_tokens)


@pytest.mark.parametrize("closes", ["never", "after each answer", "without a word"])
def test_requests_that_follow_one_another_share_a_connection(closes: str) -> None:
    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        n_prompt = len(body["prompt"])
        return (
            (200, {"usage": {"prompt_tokens": n_prompt}}) if n_prompt else (429, {"error": "full"})
        )

    async def ask_in_turn(url: str) -> list[Answer]:
        with closing(Client(Target(url), TIMEOUT)) as client:
            return [await client.ask(b'{"prompt": %s}' % ids) for ids in (b"[7]", b"[]", b"[1, 2]")]

    with fake_completions(respond) as fake:
        fake.closes, fake.says_so = closes != "never", closes != "without a word"
        answers = asyncio.run(ask_in_turn(fake.url))
    assert [answer.error for answer in answers] == [None, "HTTP 429: full", None]
    assert [answer.usage and answer.usage["prompt_tokens"] for answer in answers] == [1, None, 2]
    assert all(answer.e2e > 0 and not answer.event_times for answer in answers[::2])
    assert len(fake.connections) == (1 if closes == "never" else 3)
