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
    others = b": keep-alive\n\n", b"event: message\nid: 7\n"
    stream = others[0] + event("é\n") + others[1] + event("b") + usage(2, 2) + DONE
    stream = stream.replace(b"\n\n", 2 * line_end)
    for cut in range(len(stream) + 1):
        answer = Answer()
        answer.feed(stream[:cut], 1.0)
        answer.feed(stream[cut:], 2.0)
        answer.finish(2.0)
        assert (answer.error, len(answer.event_times), answer.n_tokens) == (None, 2, 2), cut


def test_a_chat_holds_its_text_in_deltas() -> None:
    deltas: list[dict[str, str] | None] = [{"role": "assistant"}, {"content": ""}, None]
    answer = Answer()
    for now, delta in enumerate([*deltas, {"content": "a"}, {"content": "b"}]):
        answer.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n", now)
    answer.finish(5.0)
    assert (answer.error, answer.event_times) == (None, [3, 4])


def test_events_are_counted_without_usage() -> None:
    with fake_completions(lambda _: (200, [event("a"), event("b c") + event("d"), DONE])) as fake:
        answer = ask(fake.url)
    assert (answer.error, len(answer.event_times), answer.n_tokens) == (None, 3, 3)


def test_an_event_in_two_packets_arrives_with_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = event("a")
    with fake_completions(lambda _: (200, [whole[:20], whole[20:], DONE])) as fake:
        fake.step = step = threading.Semaphore(0)
        seen: list[int] = []
        feed = Answer.feed

        def feeding(answer: Answer, data: bytes, now: float) -> None:
            feed(answer, data, now)
            seen.append(len(answer.event_times))
            step.release()

        monkeypatch.setattr(Answer, "feed", feeding)
        assert ask(fake.url).error is None
    assert seen == [0, 1, 1]


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


def test_a_stream_that_breaks_off_is_incomplete() -> None:
    with fake_completions(lambda _: (200, [event("a"), event("b")])) as fake:
        fake.breaks_off = True
        answer = ask(fake.url)
    assert (answer.error, len(answer.event_times)) == ("the connection broke off", 2)


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


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BROKEN = {
    b"": "the connection broke off",
    b"HTTP/1.1 200": "the connection broke off",
    WHOLE + b"Content-Length: 99\r\n\r\n{}": "the connection broke off",
    WHOLE + b"Transfer-Encoding: chunked\r\n\r\n1f\r\n{}": "the connection broke off",
    b"220 mail.example\r\n": "the response is not HTTP: ",
    WHOLE + b"Content-Length: x\r\n\r\n": "the response is not HTTP: ",
    b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\n\xffbad": "HTTP 503: \ufffdbad",
    **{
        WHOLE
        + b"Content-Length: %d\r\n\r\n%s" % (len(body), body): "the answer is no JSON with usage"
        for body in (b"", b"[]", b"{}", b'{"usage": null}')
    },
}


@pytest.mark.parametrize("response", BROKEN)
def test_a_broken_response_is_one_error(response: bytes) -> None:
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
    assert (answered.error or "").startswith(BROKEN[response])


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
