"""Encoder-decoders over HTTP: every server gets every source, greedy, alone and with beams."""

from __future__ import annotations

from typing import Any

from kvasir.loadtest.bench_seq2seq import Plan, bench_seq2seq
from tests.loadtest.json_server import answering


def translate(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}


def test_servers_get_the_same_sources() -> None:
    plan = Plan(concurrency=3, requests=12, rounds=2, num_beams=5, vocab_size=300)
    with answering(translate) as (first, one), answering(translate) as (second, other):
        figures = bench_seq2seq([first, second], plan)
    assert [row.server for row in figures] == [first, second]
    sources, of_other = (sorted(body["prompt"] for body in bodies) for bodies in (one, other))
    assert sources == of_other
    beams = [body["prompt"] for body in one if body.get("num_beams") == 5]
    greedy = [body["prompt"] for body in one if "num_beams" not in body]
    assert len(beams) == 3 * 12  # the first of three rounds warms up
    assert len(greedy) == 3 * (12 + 4)
    assert {*map(tuple, beams)} == {*map(tuple, greedy)}
    assert all(8 <= len(source) <= 64 and max(source) < 299 for source in sources)
    assert all(body["max_tokens"] == len(body["prompt"]) for body in one)
    assert all(
        row.greedy_tokens_per_second > 0 and row.beam_tokens_per_second > 0 and row.token_ms > 0
        for row in figures
    )
