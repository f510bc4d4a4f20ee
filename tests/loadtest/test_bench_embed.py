"""Embeddings over HTTP: every text is sent to every server, and a refusal ends the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.loadtest.bench_embed import Plan, bench_embed
from tests.loadtest.json_server import answering


def count_words(body: dict[str, Any]) -> dict[str, Any]:
    return {"data": [], "usage": {"prompt_tokens": len(body["input"].split())}}


def test_servers_get_the_same_texts() -> None:
    plan = Plan(concurrency=3, requests=20, lengths=(8, 64), rounds=2)
    with answering(count_words) as (first, one), answering(count_words) as (second, other):
        figures = bench_embed([first, second], plan)
    texts, of_other = ([body["input"] for body in bodies] for bodies in (one, other))
    assert [row.server for row in figures] == [first, second]
    assert sorted(texts) == sorted(of_other)
    assert len(set(texts)) > 60  # of three rounds, the first of which warms up
    assert min(len(text.split()) for text in texts) >= 4
    assert all(0 < row.p50_ms <= row.p95_ms and row.short_p50_ms > 0 for row in figures)


USED = b'{"usage": {"prompt_tokens": 3}}'
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (b"", "before"),
        (b"HTTP/1.1 200", "before"),
        (OK + b"Content-Length: 99\r\n\r\n" + USED, "before"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1f\r\n" + USED, "before"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (OK + b"Content-Length: x\r\n\r\n", "not HTTP"),
        (OK + b"Content-Length: 0\r\n\r\n", "not JSON"),
        (OK + b"Content-Length: 2\r\n\r\n[]", "prompt_tokens"),
        (OK + b"Content-Length: 2\r\n\r\n{}", "prompt_tokens"),
        (OK + b"Content-Length: 15\r\n\r\n" + b'{"usage": null}', "prompt_tokens"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\n\xffbad", "503.*bad"),
    ],
)
def test_a_broken_answer_is_one_error(response: bytes, complaint: str) -> None:
    plan = Plan(concurrency=1, requests=1, rounds=1)
    with answering(lambda _: response) as (url, _), pytest.raises(ConnectionError, match=complaint):
        bench_embed([url], plan)


def test_a_chunked_answer_is_read() -> None:
    first, second = USED[:9], USED[9:]
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (first, second, b""))
    response = OK + b"Transfer-Encoding: chunked\r\n\r\n" + pieces
    with answering(lambda _: response) as (url, _):
        (row,) = bench_embed([url], Plan(concurrency=1, requests=1, rounds=1))
    assert row.tokens_per_second > 0


def test_a_refusal_is_shown() -> None:
    with answering(count_words, 400) as (url, _), pytest.raises(ConnectionError, match="400"):
        bench_embed([url], Plan(concurrency=1, requests=1, rounds=1))
