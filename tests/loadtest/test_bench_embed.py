"""Embeddings over HTTP: every text is sent to every server, and a refusal ends the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.bench_embed import Plan, bench_embed
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


def test_a_refusal_is_shown() -> None:
    with answering(count_words, 400) as (url, _), pytest.raises(ConnectionError, match="400"):
        bench_embed([url], Plan(concurrency=1, requests=1, rounds=1))
