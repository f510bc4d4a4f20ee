"""Encoder-decoders over HTTP: servers in alternating rounds, each greedy, alone and with beams.

Sources are random tokens, of log-uniform lengths, and a target may become as long as its source.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

import numpy as np

from kvasir.loadtest.json_client import Answer, JsonClient, Rounds, medians, n_used
from kvasir.model.progress import Progress, followed, unheard

_FIRST_TOKEN = 4  # those before it are often special


@dataclass(frozen=True, slots=True)
class Plan:
    """The sources of a round: `requests` of them, by `concurrency` clients. lengths: in tokens."""

    concurrency: int = 16
    requests: int = 64
    lengths: tuple[int, int] = (8, 64)
    num_beams: int = 4
    rounds: int = 3
    vocab_size: int = 58101
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seq2SeqFigures:
    """The medians of rounds: target tokens a second in a closed loop, and a token's milliseconds.

    token_ms: of one client's greedy targets, with the reading of their sources.
    """

    server: str
    greedy_tokens_per_second: float
    token_ms: float
    beam_tokens_per_second: float


def bench_seq2seq(
    addresses: list[str], plan: Plan, progress: Progress = unheard
) -> list[Seq2SeqFigures]:
    """Measure servers, each a URL or a model directory to serve, in turn.

    Raises as `medians` does.
    """
    return medians(
        addresses,
        "/v1/completions",
        lambda clients: _measure(clients, plan, progress),
        Seq2SeqFigures,
    )


async def _measure(clients: list[JsonClient], plan: Plan, progress: Progress) -> Rounds:
    generator = np.random.default_rng(plan.seed)
    figures: Rounds = [[] for _ in clients]
    for number in followed(range(plan.rounds + 1), "rounds", progress):
        least, most = np.log(plan.lengths)
        lengths = np.exp(generator.uniform(least, most, plan.requests)).round().astype(int)
        sources = [generator.integers(_FIRST_TOKEN, plan.vocab_size - 1, n) for n in lengths]
        greedy = [_body(plan, source.tolist()) for source in sources]
        beams = [_body(plan, source.tolist(), num_beams=plan.num_beams) for source in sources]
        n_alone = max(1, plan.requests // plan.concurrency)
        for client, rows in zip(clients, figures, strict=True):
            together = await _speed(client, greedy, plan.concurrency)
            alone = await _speed(client, greedy[:n_alone], 1)
            searching = await _speed(client, beams, plan.concurrency)
            if number:  # the first round warms up
                rows.append((together, 1e3 / alone, searching))
    return figures


def _body(plan: Plan, source: list[int], **options: int) -> bytes:
    named = {} if plan.model is None else {"model": plan.model}
    fixed = {"prompt": source, "max_tokens": len(source), "temperature": 0.0}
    return json.dumps(fixed | named | options).encode()


async def _speed(client: JsonClient, bodies: Iterable[bytes], concurrency: int) -> float:
    """Return the target tokens a second of so many connections that share the requests."""
    waiting, began = iter(bodies), perf_counter()
    loops: list[list[Answer]] = await asyncio.gather(
        *(client.run(waiting) for _ in range(concurrency))
    )
    seconds = perf_counter() - began
    n_tokens = sum(n_used(answer, "completion_tokens") for _, answer in chain(*loops))
    if not n_tokens:
        raise ConnectionError("no target had a token; try another --seed")
    return n_tokens / seconds
