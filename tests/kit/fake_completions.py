"""A server on a real socket that answers completions with bytes from the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.kit.fake_runner import TIMEOUT

# body -> status, and pieces of the stream, or JSON
Respond = Callable[[dict[str, Any]], tuple[int, Iterable[bytes] | dict[str, Any]]]


class FakeCompletions:
    """bodies: of all requests. step: if set, released by the test before each further piece.

    answers: those that come in turn, if no function answers. about: its model.
    """

    def __init__(self, respond: Respond | None = None) -> None:
        self.respond = respond or (lambda _: self.answers.pop(0))
        self.answers: list[tuple[int, list[bytes]]] = []
        self.about: dict[str, Any] = {"id": "some/model", "max_model_len": 64}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.connections: set[tuple[str, int]] = set()
        self.step: threading.Semaphore | None = None
        self.breaks_off = self.closes = False  # before an answer's end, after it
        self.says_so = True  # that it closes
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.headers.append(dict(self.headers))
                fake.send(self, 200, [json.dumps({"data": [fake.about]}).encode()])

            def do_POST(self) -> None:
                fake.answer(self)

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.bodies.append(body)
        self.headers.append(dict(handler.headers))
        self.paths.append(handler.path)
        self.connections.add(handler.client_address)
        self.send(handler, *self.respond(body), self.step)

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        pieces: Iterable[bytes] | dict[str, Any],
        step: threading.Semaphore | None = None,
    ) -> None:
        handler.send_response(status)
        if isinstance(pieces, dict):
            pieces = [json.dumps(pieces).encode()]
            handler.send_header("Content-Type", "application/json")
        if self.closes and self.says_so:
            handler.send_header("Connection", "close")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
            if step is not None:
                assert step.acquire(timeout=TIMEOUT)
        if not self.breaks_off:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = self.breaks_off or self.closes


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve in a thread while the block runs."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT)


@contextmanager
def fake_completions(respond: Respond | None = None) -> Iterator[FakeCompletions]:
    fake = FakeCompletions(respond)
    with running(fake.server):
        yield fake


def event(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]} | more).encode() + b"\n\n"


def usage(n_prompt: int, n_tokens: int) -> bytes:
    counts = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
    }
    return (
        b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": counts}).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def well(body: dict[str, Any]) -> tuple[int, list[bytes]]:
    """Answer with as many tokens as were asked for, one in each event."""
    n_tokens = body["max_tokens"]
    return 200, [
        *(event(f" {i}") for i in range(n_tokens)),
        usage(len(body["prompt"]), n_tokens) + DONE,
    ]
