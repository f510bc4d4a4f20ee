"""Embeddings over HTTP: servers in alternating rounds, in a closed loop and with a lone short text.

Texts are English words, of log-uniform lengths in tokens, a token being three quarters of a word.
Rare words are left out: a text with many of them would have more tokens than models take.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pydoc_data.topics import topics
from statistics import median
from time import perf_counter

import numpy as np

from kvasir.loadtest.json_client import JsonClient, Rounds, medians, n_used
from kvasir.model.progress import Progress, followed, unheard

_WORDS_PER_TOKEN = 0.75
_SHORT = 16  # tokens of the lone text
_N_SHORT = 30  # of them in a round
_FOUND = [word for word in " ".join(topics.values()).split() if re.fullmatch("[a-z]{1,10}", word)]
_COUNTS = Counter(_FOUND)
_WORDS = [word for word in _FOUND if _COUNTS[word] >= 5]


@dataclass(frozen=True, slots=True)
class Plan:
    """The texts of a round: `requests` of them, by `concurrency` clients. lengths: in tokens."""

    concurrency: int = 16
    requests: int = 200
    lengths: tuple[int, int] = (8, 256)
    rounds: int = 3
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EmbedFigures:
    """The medians of rounds: of the closed loop, and the milliseconds of a lone short text."""

    server: str
    texts_per_second: float
    tokens_per_second: float
    p50_ms: float
    p95_ms: float
    short_p50_ms: float


def bench_embed(
    addresses: list[str], plan: Plan, progress: Progress = unheard
) -> list[EmbedFigures]:
    """Measure servers, each a URL or a model directory to serve, in turn.

    Raises as `medians` does.
    """
    return medians(
        addresses, "/v1/embeddings", lambda clients: _measure(clients, plan, progress), EmbedFigures
    )


async def _measure(clients: list[JsonClient], plan: Plan, progress: Progress) -> Rounds:
    generator = np.random.default_rng(plan.seed)
    figures: Rounds = [[] for _ in clients]

    def body(n_tokens: int) -> bytes:
        n_words = max(1, round(n_tokens * _WORDS_PER_TOKEN))
        start = int(generator.integers(len(_WORDS) - n_words))
        text = " ".join(_WORDS[start : start + n_words])
        named = {} if plan.model is None else {"model": plan.model}
        return json.dumps({"input": text, "encoding_format": "float"} | named).encode()

    for number in followed(range(plan.rounds + 1), "rounds", progress):
        least, most = np.log(plan.lengths)
        lengths = np.exp(generator.uniform(least, most, plan.requests)).astype(int)
        bodies, short = [body(int(n)) for n in lengths], [body(_SHORT) for _ in range(_N_SHORT)]
        for client, rows in zip(clients, figures, strict=True):
            waiting, began = iter(bodies), perf_counter()
            loops = await asyncio.gather(*(client.run(waiting) for _ in range(plan.concurrency)))
            seconds = perf_counter() - began
            times, answers = zip(*chain(*loops), strict=True)
            n_tokens = sum(n_used(answer, "prompt_tokens") for answer in answers)
            alone = [took for took, _ in await client.run(short)]
            if number:  # the first round warms up
                p50, p95 = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.95))
                speed = len(times) / seconds, n_tokens / seconds
                rows.append((*speed, p50, p95, 1e3 * median(alone)))
    return figures
