"""Connections: limits on heads, on slow clients, and on their number; none on long answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvasir.server.process.connection import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MIN_BODY_RATE,
)
from kvasir.server.process.serve import configure
from kvasir.server.process.shared_limits import SharedLimits, Turns, max_connections
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.live import Live, live, wait
from tests.kit.serving import VOCAB_SIZE, fake_app

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(n_body: int) -> bytes:
    return b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % n_body


class Clock:
    """An event loop whose clock stands still between calls of `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.create_task = asyncio.get_running_loop().create_task

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(timer := Timer(self, self.now + delay, lambda: callback(*arguments)))
        return timer

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and (first := min(self.timers, key=lambda timer: timer.at)).at <= end:
            self.now = first.at
            first.cancel()
            first.fire()
        self.now = end
        await settle()


@dataclass(eq=False)
class Timer:
    clock: Clock
    at: float
    fire: Callable[[], None]

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


async def settle() -> None:
    """Let the application run until it waits."""
    for _ in range(100):
        await asyncio.sleep(0)


class Transport(asyncio.Transport):
    n_unread = 0  # bytes that the client has left in the write buffer

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.n_unread

    def do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    set_write_buffer_limits = set_protocol = write_eof = do_nothing

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    pause_reading = resume_reading = do_nothing


any_app = cache(partial(fake_app, FakeRunner(VOCAB_SIZE)))


class Connection:
    """A connection to an application that answers with the length of a body, once it may."""

    def __init__(self, application: Any = None) -> None:
        self.clock, self.transport = Clock(), Transport()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.n_begun = self.n_disconnects = 0
        known = configure(any_app())
        config = uvicorn.Config(
            application or self.application,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=known.timeout_keep_alive,
        )
        kind: Any = known.http
        self.protocol = kind(config, ServerState(), {}, self.clock)
        self.shared: SharedLimits = self.protocol.shared
        self.protocol.connection_made(self.transport)

    async def application(self, _scope: Any, receive: Any, send: Any) -> None:
        n_body, more = 0, True
        self.n_begun += 1
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.n_disconnects += 1
                return
            n_body += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_answer.wait()
        await send({"type": "http.response.body", "body": b"<%d>" % n_body})

    async def receive(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await settle()

    async def receive_for(self, seconds: int, data: bytes) -> None:
        """Receive some data after each second, until the connection is closed."""
        for _ in range(seconds):
            await self.clock.advance(1.0)
            if self.transport.is_closed:
                break
            if data:
                await self.receive(data)

    @property
    def ending(self) -> str:
        """The state of the connection."""
        if self.transport.is_aborted:
            return "cut off"
        return "closed" if self.transport.is_closed else "open"

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", self.transport.written)]

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in re.findall(rb"<(\d+)>", self.transport.written)]


async def refusing(_scope: Any, _receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


# Of a chunked body: what begins trailers, an extension or a size, and goes on for ever.
AROUND_BODIES = [
    (b"3\r\nabc\r\n0\r\nx: ", b"y"),
    (b"3\r\nabc\r\n0\r\n", b"y: z\r\n"),
    (b"1;", b"y"),
    (b"", b"0"),
]


async def answer_early(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<0>"})


@pytest.mark.parametrize(
    ("application", "came", "each_second", "seconds", "ending", "n_answers"),
    [
        *((None, [begun], b"", 30, "cut off", 0) for begun in (GET[:5], GET[:-2], post(10))),
        (None, [post(10), b"123"], b"", 30, "cut off", 0),
        (None, [b"\r\n\r\n"], b"\r\n", 30, "cut off", 0),
        (None, [post(200 * MIN_BODY_RATE)], b"x" * (MIN_BODY_RATE - 1), 30, "cut off", 0),
        # Bytes around a body make it no faster.
        (None, [CHUNKED], b"1;" + b"y" * 1000 + b"\r\nx\r\n", 30, "cut off", 0),
        *((None, [CHUNKED + begun], again, 30, "cut off", 0) for begun, again in AROUND_BODIES),
        (refusing, [post(10**9)], b"x" * 100_000, 30, "cut off", 1),
        # Without a request in the making, later after the first.
        (None, [], b"", 30, "closed", 0),
        (None, [GET], b"", 75, "closed", 1),
        (None, [post(3) + b"abc"], b"", 75, "closed", 1),
        (answer_early, [post(3), b"abc"], b"", 75, "closed", 1),
        (answer_early, [post(3), b"abc", GET], b"", 75, "closed", 2),
    ],
)
async def test_a_request_must_arrive_in_time_and_the_next_must_begin(
    application: Any,
    came: list[bytes],
    each_second: bytes,
    seconds: int,
    ending: str,
    n_answers: int,
) -> None:
    connection = Connection(application)
    for data in came:
        await connection.receive(data)
    assert len(connection.statuses) == n_answers
    await connection.receive_for(seconds - 1, each_second)
    assert connection.ending == "open"
    await connection.clock.advance(1.0)
    assert connection.ending == ending
    connection.protocol.connection_lost(None)
    await settle()
    is_begun = not n_answers and came and came[0].startswith(b"POST")
    assert connection.n_disconnects == bool(is_begun)
    assert connection.clock.timers == []


async def test_a_long_body_that_is_fast_enough_may_take_long() -> None:
    connection, each_second = Connection(), b"x" * MIN_BODY_RATE
    await connection.receive(post(200 * MIN_BODY_RATE) + each_second)
    await connection.receive_for(199, each_second)
    assert (connection.ending, connection.lengths) == ("open", [200 * MIN_BODY_RATE])


@pytest.mark.parametrize("early", [b"", GET[:5], post(100_000), post(100_000) + b"x" * 70_000])
async def test_an_answer_may_take_long_whatever_arrived_of_the_next_request(early: bytes) -> None:
    connection = Connection()
    connection.may_answer.clear()
    await connection.receive(GET + early)
    for _ in range(100):
        await connection.clock.advance(30.0)
    assert connection.ending == "open"
    connection.may_answer.set()
    await settle()
    assert connection.lengths == [0]
    await connection.clock.advance(100.0)
    assert connection.transport.is_closed


@pytest.mark.parametrize("n_early", [MAX_PIPELINED, MAX_PIPELINED + 1, 8000])
async def test_few_requests_wait_for_the_answer_to_another(n_early: int) -> None:
    """Beyond those there is a 503, also for the first, which is disconnected."""
    connection = Connection()
    connection.protocol.data_received(GET * (1 + n_early))
    while connection.protocol._unparsed:
        await settle()
    await settle()
    if n_early == MAX_PIPELINED:
        assert connection.statuses == [200] * (1 + n_early)
    else:
        assert connection.statuses == [503]
        assert connection.n_begun == connection.n_disconnects == 1


@pytest.mark.parametrize(
    "target", [b"/x HTTP/1.1", b"/x HTTP/1.0", b"/v1/files/f/content HTTP/1.1"]
)
async def test_an_answer_is_counted_while_its_client_does_not_read(target: bytes) -> None:
    """All of it if it is in memory; of a file only what has been read."""
    may_end = asyncio.Event()

    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * 600, "more_body": True})
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"x" * 400})

    connection = Connection(large)
    unread = connection.shared.unread
    await connection.receive(GET.replace(b"/x HTTP/1.1", target))
    connection.transport.n_unread = 600
    connection.protocol.pause_writing()
    assert unread.total == (600 if b"files" in target else 1000)
    connection.protocol.resume_writing()
    assert unread.total == 0
    may_end.set()
    await settle()
    connection.protocol.pause_writing()
    assert unread.total == 600
    connection.protocol.connection_lost(None)
    assert (unread.total, unread.held) == (0, {})


async def test_work_of_many_connections_is_done_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe, another request and as many slices as there is time for, each in order."""
    times = iter(range(100))  # a turn has time for one slice
    monkeypatch.setattr(
        "kvasir.server.process.shared_limits.monotonic", lambda: next(times) * 0.004
    )
    turns, tasks, done = Turns(), list[asyncio.Task[None]](), list[str]()

    async def request(name: str) -> None:
        await turns.wait(is_probe="probe" in name)
        done.append(name)

    for name in ("a", "b", "probe", "second probe"):
        tasks.append(asyncio.create_task(request(name)))
    for name in ("slice a", "slice b"):
        turns.parse(partial(done.append, name))
    turns.parse(partial(turns.parse, partial(done.append, "slice c")))
    seen = []
    for _ in range(6):
        await asyncio.sleep(0)
        seen.append(done.copy())
        done.clear()
    turns_done = [["slice a"], ["probe", "a", "slice b"], ["second probe", "b"], ["slice c"]]
    assert [one for one in seen if one] == turns_done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_client_may_end_its_side_and_still_be_answered(
    served: Live, stream: bool, is_closed: bool
) -> None:
    """But one that has closed its connection cancels its request."""
    served.runner.hold()
    with served.post_raw(max_tokens=3, stream=stream) as client:
        client.shutdown(socket.SHUT_WR)
        wait(served.submitted)
        if not is_closed:
            served.runner.release()
            with client.makefile("rb") as file:
                answer = file.read()
    wait(served.left)
    served.runner.release()
    if not is_closed:
        final = re.sub(rb"(HTTP/1.1 100 Continue\r\n\r\n)+", b"", answer)
        assert final.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize(
    ("came", "goes_on"),
    [
        (b"", False),
        (GET[:-2], False),
        (post(3) + b"12", False),
        (GET.replace(b"1.1", b"1.0"), False),
        (GET, True),
        (GET + GET, True),
        (GET + GET[:-2], True),
        (post(9000) + b"x" * 9000 + GET, True),
    ],
)
async def test_only_a_whole_request_is_answered_after_the_end(came: bytes, goes_on: bool) -> None:
    """Not in HTTP/1.0, which has no interim response to try whether the client is there."""
    connection = Connection()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await connection.may_answer.wait()
        await connection.application(scope, receive, send)

    connection.protocol.app = waiting
    connection.may_answer.clear()
    connection.protocol.data_received(came)  # and is not parsed yet
    assert connection.protocol.eof_received() == goes_on
    await connection.clock.advance(0.3)
    assert set(connection.statuses) == ({100} if goes_on else set())
    connection.may_answer.set()
    await settle()
    if goes_on:
        n_answers = came.count(b"HTTP") - came.endswith(GET[:-2])
        assert (connection.statuses[-n_answers:], connection.transport.is_closed) == (
            [200] * n_answers,
            True,
        )
        assert connection.transport.written.count(b"connection: close") == 1


async def test_a_client_that_has_ended_its_side_is_tried_until_its_last_answer() -> None:
    """Also after an answer that has begun, which shows by itself whether the client is there."""
    connection = Connection()
    may_end = asyncio.Event()

    async def hold_all_but_the_first(*ends: Any) -> None:
        if connection.n_begun:
            await may_end.wait()
        await connection.application(*ends)

    connection.protocol.app = hold_all_but_the_first
    connection.may_answer.clear()
    await connection.receive(GET + GET)
    assert connection.protocol.eof_received()
    await connection.clock.advance(0.3)
    connection.may_answer.set()
    await settle()
    assert connection.statuses == [200]
    await connection.clock.advance(0.3)
    assert connection.statuses[1] == 100
    may_end.set()


@pytest.mark.parametrize(
    ("came", "is_held", "statuses"),
    [
        (b"", False, []),
        (GET[:5], False, [503]),
        (post(9), False, [503]),
        (post(9) + b"123", False, [503]),
        (GET + post(9), False, [200, 503]),
        (GET, False, [200]),
        (post(3) + b"123", False, [200]),
        (GET, True, [200]),
        (GET + GET[:5], True, [200]),
        (GET + post(9), True, [200]),
    ],
)
async def test_an_unfinished_request_is_answered_at_shutdown(
    came: bytes, is_held: bool, statuses: list[int]
) -> None:
    """But an answer in progress is not lost."""
    connection = Connection()
    if is_held:
        connection.may_answer.clear()
    await connection.receive(came)
    connection.protocol.refuse_unfinished()
    connection.protocol.refuse_unfinished()
    connection.may_answer.set()
    await settle()
    assert connection.statuses == statuses
    await connection.clock.advance(2.0)
    assert connection.transport.is_closed == (503 in statuses)


@pytest.mark.parametrize(("begun", "repeated"), AROUND_BODIES)
async def test_trailers_and_chunk_extensions_are_bounded_as_heads_are(
    begun: bytes, repeated: bytes
) -> None:
    connection = Connection()
    await connection.receive(CHUNKED + begun + repeated * (MAX_HEAD_BYTES // len(repeated)))
    assert connection.statuses == []
    for _ in range(40):
        await connection.receive(repeated * 1000)
    assert connection.statuses == [431]


async def test_unfinished_heads_are_counted_as_bodies_are() -> None:
    connection = Connection()
    unfinished = connection.shared.unfinished
    await connection.receive(GET[:-2] + b"a: " + b"x" * 30_000)
    assert unfinished.total >= 30_000
    await connection.receive(b"\r\n\r\n")
    assert (connection.lengths, unfinished.total) == ([0], 0)


async def test_trailers_are_no_headers() -> None:
    connection = Connection()
    await connection.receive(CHUNKED + b"3\r\nabc\r\n")
    before = list(connection.protocol.headers)
    await connection.receive(b"0\r\nAuthorization: Bearer x\r\n\r\n")
    assert connection.lengths == [3]
    assert connection.protocol.headers == before


async def test_trailers_that_do_not_end_are_cut_off_without_a_second_answer() -> None:
    """The client would take a second answer for that of its next request."""
    connection = Connection(refusing)
    await connection.receive(CHUNKED + b"0\r\nx: ")
    for _ in range(40):
        await connection.receive(b"y" * 1000)
    assert connection.statuses == [413]
    await connection.clock.advance(2.0)
    assert connection.transport.is_closed


@pytest.mark.parametrize(
    ("is_complete", "n_read", "early", "is_cut"),
    [
        (True, 1, b"", False),
        (True, 1, GET, False),
        (True, 0, b"", True),
        (False, 1, b"", True),
        (False, 0, b"", True),
    ],
)
async def test_only_a_complete_answer_may_be_read_slowly(
    is_complete: bool, n_read: int, early: bytes, is_cut: bool
) -> None:
    """The next request begins once it has been read."""
    connection = Connection()
    if not is_complete:
        connection.may_answer.clear()
    await connection.receive(GET)
    connection.transport.n_unread = 100_000
    connection.protocol.pause_writing()
    await connection.receive(early)
    connection.transport.n_unread -= n_read
    await connection.clock.advance(59.0)
    assert not connection.transport.is_aborted
    await connection.clock.advance(1.0)
    assert connection.transport.is_aborted == is_cut
    assert connection.n_begun == 1
    if early:
        connection.protocol.resume_writing()
        await settle()
        assert connection.lengths == [0, 0]
    connection.protocol.connection_lost(None)
    await settle()
    assert connection.clock.timers == []


def head(chance: random.Random) -> tuple[bytes, bool]:
    """Return a head, and whether its URL, a header or the number of headers is too large."""
    n_url = chance.choice([1, 1, 900, MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1])
    n_headers = chance.choice([0, 3, MAX_HEADERS, MAX_HEADERS + 1])
    headers = [(b"a", b"x" * chance.choice([1, 1, 500, MAX_HEAD_BYTES])) for _ in range(n_headers)]
    size = n_url + sum(len(name) + len(value) + 4 for name, value in headers)
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    is_too_large = size > MAX_HEAD_BYTES or n_headers > MAX_HEADERS
    return b"GET /%b HTTP/1.1\r\n%b\r\n" % (b"u" * (n_url - 1), lines), is_too_large


@pytest.mark.parametrize("seed", range(4))
async def test_the_same_bytes_are_answered_the_same_however_they_are_cut(seed: int) -> None:
    """Pipelined requests, up to the first whose head is too large."""
    chance = random.Random(seed)
    seen = set()
    for _ in range(25):
        sent, expected, lengths = b"", [], []
        for _ in range(4):
            if chance.random() < 0.5:
                n_body = chance.choice([0, 1, 5000])
                sent += post(n_body) + b"x" * n_body
                lengths.append(n_body)
                expected.append(200)
                continue
            bytes_of_head, is_too_large = head(chance)
            sent += bytes_of_head
            expected.append(431 if is_too_large else 200)
            if is_too_large:
                break
            lengths.append(0)
        connection = Connection()
        while sent:
            n = chance.choice([1, 7, 100, 3000, 10**6])
            await connection.receive(sent[:n])
            sent = sent[n:]
        if 431 in expected:  # which ends the connection before earlier answers that have not begun
            assert connection.statuses in [[*expected[:n], 431] for n in range(len(expected))]
        else:
            assert connection.statuses == expected
        assert connection.lengths == lengths[: len(connection.lengths)]
        seen.add(tuple(connection.statuses))
        await connection.clock.advance(2.0)
        assert connection.transport.is_closed == (431 in expected)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/generate", b"x: " + b"x" * 100_000 + b"\r\n\r\n"),
        ("/v1/completions", b"x: " + b"x" * 10_000_000),
        ("/v1/completions", b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n"),
        ("/generate", b"x: y\r\n" * 100_000),
        ("", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
    ],
    ids=["one", "unfinished", "many", "endless", "no HTTP"],
)
def test_what_cannot_be_parsed_is_refused_in_the_words_of_its_api(
    served: Live, path: str, rest: bytes
) -> None:
    """A client that reads only when it has sent everything gets the answer too."""
    begun = f"POST {path} HTTP/1.1\r\nX-Request-Id: mine\r\n" if path else ""
    with socket.create_connection(("127.0.0.1", served.port), TIMEOUT) as client:
        client.sendall(begun.encode() + rest)
        with client.makefile("rb") as file:
            answer = file.read()
    top, _, body = answer.partition(b"\r\n\r\n")
    lines = top.decode().lower().split("\r\n")
    status = "431 request header fields too large" if path else "400 bad request"
    assert lines[0] == f"http/1.1 {status}"
    assert {"connection: close", "content-type: application/json"} <= set(lines)
    assert any(line.startswith("x-request-id: ") for line in lines)
    shown = json.loads(body)
    if path == "/generate":
        assert shown.keys() == {"error", "error_type"}
    else:
        code = "request_head_too_large" if path else None
        assert shown["error"].keys() == {"message", "type", "param", "code"}
        assert shown["error"]["code"] == code
        assert ("more than 32768 bytes" in shown["error"]["message"]) == bool(path)
    reason = "request_head_too_large" if path else "invalid_request_error"
    assert served.value("requests_rejected_total", reason=reason) >= 1
    with served.http() as http:
        assert http.get("/health").status_code == 200


def offering(request: bytes, also: bytes = b"") -> bytes:
    """Return a request that offers another protocol, as Java's HTTP client does."""
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\nConnection: Upgrade%b\r\nUpgrade: h2c\r\n\r\n%b" % (head, also, body)


@pytest.mark.parametrize("n_cut", [1, 7, 10**6])
@pytest.mark.parametrize("also", [b"", b", close"])
async def test_a_request_to_upgrade_is_answered_in_http_1_1(n_cut: int, also: bytes) -> None:
    """With its body, and so is the next one."""
    connection = Connection()
    requests = GET, post(3) + b"abc", CHUNKED + b"4\r\nabcd\r\n0\r\n\r\n"
    sent = b"".join(map(offering, requests)) + offering(post(5) + b"abcde", also)
    for start in range(0, len(sent), n_cut):
        await connection.receive(sent[start : start + n_cut])
    assert connection.lengths == [0, 3, 4, 5]
    assert connection.transport.is_closed == bool(also)


@pytest.mark.parametrize("head", [post(9), post(9).replace(b"1.1", b"1.0"), CHUNKED])
async def test_a_client_that_is_still_sending_can_read_its_answer_before_the_close(
    head: bytes,
) -> None:
    connection = Connection(refusing)
    await connection.receive(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    await connection.receive(b"x" * 100_000)
    assert connection.statuses == [413]
    assert connection.ending == "open"
    await connection.clock.advance(2.0)
    assert connection.ending == "closed"
    connection.protocol.connection_lost(None)
    assert connection.clock.timers == []


@pytest.fixture(scope="module")
def served() -> Any:
    with live() as started:
        yield started


class Peer:
    def __init__(self) -> None:
        self.is_aborted = self.is_refused = False
        self.transport = self

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("most", [1, 4, 9])
def test_the_connection_that_has_waited_longest_makes_room(
    most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter of the connections never have a request, and so can make room for a probe."""
    monkeypatch.setattr("kvasir.server.process.shared_limits._LOG_INTERVAL", math.inf)
    chance = random.Random(most)
    shared: Any = SharedLimits(most, 0, 0)
    waiting, busy, n_aborted, n_full = list[Peer](), list[Peer](), 0, 0
    for _ in range(500):
        inside = waiting + busy
        peer = chance.choice(inside) if inside and chance.random() < 0.6 else Peer()
        if peer not in inside:  # connects
            waiting.append(peer)
            expected = waiting.pop(0) if len(inside) == most else None
            shared.add(peer, len(inside) + 1)
            aborted = [one for one in (*inside, peer) if one.is_aborted]
            assert aborted == ([expected] if expected else [])
            n_aborted += len(aborted)
            continue
        (waiting if peer in waiting else busy).remove(peer)
        (action,) = chance.choices(["disconnects", "waits", "begins"], [1, 4, 8])
        if action == "disconnects":
            shared.remove(peer)
        elif action == "waits":
            shared.wait(peer)
            waiting.append(peer)
        else:
            has_room = len(busy) < most - most // 4
            assert shared.begin(peer) == has_room
            n_full += not has_room
            if not has_room:
                shared.wait(peer)
            (busy if has_room else waiting).append(peer)
    assert n_aborted > 30
    assert caplog.text.count("more connections than open files allow") == 1
    assert (n_full > 0) == (most >= 4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", ["unfinished", "unread"])
def test_what_clients_make_the_server_hold_is_bounded_together(what: str, seed: int) -> None:
    """The one that began first makes room, even if it is another that grows.

    A client that does not read begins anew whenever it has read something, and may be alone with
    more than the limit.
    """
    chance = random.Random(seed)
    shared: Any = SharedLimits(99, 100, 100)
    held: dict[Any, int] = {}
    ended = list[Any]()

    class Client:
        def refuse(self, error: Exception) -> None:
            assert "100 bytes" in str(error)
            self.cut_off()

        def cut_off(self, _reason: str = "") -> None:
            ended.append(self)
            shared.remove(self)

    for _ in range(500):
        client = chance.choice(list(held)) if held and chance.random() < 0.7 else Client()
        if chance.random() < 0.2:
            shared.remove(client)
            held.pop(client, None)
            continue
        n_bytes = chance.randint(1, 60) * chance.choice([1, 1, 3])
        before = held.get(client, 0) if what == "unfinished" else held.pop(client, 0) * 0
        held[client] = before + n_bytes
        expected = list[Any]()
        while sum(held.values()) > 100 and len(held) > (what == "unread"):
            expected.append(next(iter(held)))
            del held[expected[-1]]
        ended.clear()
        (shared.hold if what == "unfinished" else shared.stall)(client, n_bytes)
        assert ended == expected
        assert getattr(shared, what).total == sum(held.values())


async def test_memory_is_returned_once_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, returned = asyncio.get_running_loop(), asyncio.Semaphore(0)
    module = "kvasir.server.process.shared_limits"
    monkeypatch.setattr(f"{module}._BURST_END", 0.0)
    release = partial(loop.call_soon_threadsafe, returned.release)
    monkeypatch.setattr(f"{module}.return_freed_memory", release)
    shared: Any = SharedLimits(99, 2**26, 2**26)
    for n_bytes in (2**23, 2**24):  # the first is no burst
        peers = [Peer(), Peer()]
        for peer in peers:
            shared.hold(peer, n_bytes // 2)
        for peer in peers:
            shared.remove(peer)
    await returned.acquire()
    assert returned.locked()


@pytest.mark.parametrize("end", ["complete", "early answer", "lost", "refused", "shutdown"])
async def test_a_body_is_counted_until_it_is_complete_or_unwanted(end: str) -> None:
    connection = Connection(refusing if end == "early answer" else None)
    shared, n_held = connection.shared, 5 * (end != "early answer")
    await connection.receive(post(9))
    await connection.receive(b"12345")
    assert sum(shared.unfinished.held.values()) == shared.unfinished.total == n_held
    if end == "complete":
        await connection.receive(b"6789")
    elif end == "lost":
        connection.protocol.connection_lost(None)
    elif end == "refused":
        shared.hold(connection.protocol, 10**9)
        assert connection.statuses == [503]
        assert b"\r\nretry-after: 1\r\n" in connection.transport.written
        await connection.receive(b"6789" + GET)
        assert connection.statuses == [503]
    elif end == "shutdown":
        connection.protocol.refuse_unfinished()
    assert (shared.unfinished.total, shared.unfinished.held) == (0, {})


@pytest.mark.parametrize("begun", [post(9), post(9) + b"12345", GET[:-2], GET + post(9)])
async def test_an_unfinished_request_makes_room(begun: bytes) -> None:
    """But not a request that is being answered."""
    connection = Connection()
    connection.may_answer.clear()
    for data in (GET, begun):
        await connection.receive(data)
        assert connection.protocol not in connection.shared._waiting
    connection.may_answer.set()
    await settle()
    assert connection.protocol in connection.shared._waiting


@pytest.mark.parametrize("version", [b"1.0", b"0.9", b"1.1"])
async def test_only_a_client_of_http_1_1_gets_chunks(version: bytes) -> None:
    """Others get the bytes of the answer until the connection closes."""
    connection = Connection()
    head = b"POST /x HTTP/%s\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n" % version
    await connection.receive(head + b"Content-Length: 3\r\n\r\n")
    await connection.receive(b"abc")
    answer = connection.transport.written
    is_new = version == b"1.1"
    assert answer.startswith(b"HTTP/1.1 100 ") == is_new
    assert (b"transfer-encoding" in answer) == is_new
    assert answer.endswith(b"\r\n3\r\n<3>\r\n0\r\n\r\n" if is_new else b"\r\n\r\n<3>")
    assert (b"connection: close" in answer) == connection.transport.is_closed == (not is_new)


def test_there_are_fewer_connections_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((40, 20), (256, 192), (2**20, 2**20 - 64), (resource.RLIM_INFINITY, 2**20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_connections() == most


async def test_a_request_beyond_those_that_leave_room_for_probes_is_refused() -> None:
    connection = Connection()
    connection.shared._most_busy = 0
    for path in (b"/health/live", b"/metrics", b"/metrics/router?x"):
        await connection.receive(GET.replace(b"/x", path))
    assert connection.statuses == [200] * 3
    await connection.receive(GET)
    assert connection.statuses[3:] == [503]
    assert b"\r\nretry-after: 1\r\n" in connection.transport.written
