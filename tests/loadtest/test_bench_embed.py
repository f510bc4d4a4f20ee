"""Embeddings over HTTP: every text is sent to every server, and a refusal ends the measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtest.bench_embed import Plan, bench_embed


class Handler(BaseHTTPRequestHandler):
    """Answers with the number of words as tokens."""

    protocol_version = "HTTP/1.1"
    texts: list[str]
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.texts.append(body["input"])
        n_tokens = len(body["input"].split())
        answer = json.dumps({"data": [], "usage": {"prompt_tokens": n_tokens}}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextmanager
def embedding(status: int = 200) -> Iterator[tuple[str, list[str]]]:
    texts: list[str] = []
    handler = type("One", (Handler,), {"texts": texts, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", texts
        server.shutdown()
        thread.join()


def test_servers_get_the_same_texts() -> None:
    plan = Plan(concurrency=3, requests=20, lengths=(8, 64), rounds=2)
    with embedding() as (first, one), embedding() as (second, other):
        figures = bench_embed([first, second], plan)
    assert [row.server for row in figures] == [first, second]
    assert sorted(one) == sorted(other)
    assert len(set(one)) > 60  # of three rounds, the first of which warms up
    assert min(len(text.split()) for text in one) >= 4
    assert all(0 < row.p50_ms <= row.p95_ms and row.short_p50_ms > 0 for row in figures)


def test_a_refusal_is_shown() -> None:
    with embedding(400) as (url, _), pytest.raises(ConnectionError, match="400"):
        bench_embed([url], Plan(concurrency=1, requests=1, rounds=1))
