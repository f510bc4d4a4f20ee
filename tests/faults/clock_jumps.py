"""Jumps of the wall clock by a year: no answer changes except for its date.

The clock jumps in this process alone, so no canary in another could tell.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fake_runner import FakeRunner
from tests.faults.report import Report
from tests.serving import VOCAB_SIZE, Served, serving

_YEAR = 365 * 86_400


def clock_jumps(n: int, seed: int = 0) -> Report:
    """Send n requests with deadlines while the clock jumps whenever it is read."""
    report = Report("clock jumps", n)
    chance = random.Random(seed)
    bodies = [
        {"prompt": "def read"[: 1 + i % 8], "max_tokens": 1 + i % 20, "seed": i, "n": 1 + i % 2}
        for i in range(n)
    ]
    usual = asyncio.run(_answers(bodies))
    with _jumping(chance) as jumped:
        unusual = asyncio.run(_answers(bodies))
        report.check(jumped[0] > n, f"the clock was read only {jumped[0]} times")
    report.lost += [
        f"{one}, not {other}" for one, other in zip(unusual, usual, strict=True) if one != other
    ]
    report.note = f"{jumped[0]} jumps"
    return report


@contextmanager
def _jumping(chance: random.Random) -> Iterator[list[int]]:
    """Make the clock jump in every module that imported it, and yield the count of reads."""
    real, jumped = time.time, [0]

    def jumping() -> float:
        jumped[0] += 1
        return real() + chance.choice((-_YEAR, 0, _YEAR))

    places = [module for module in [*sys.modules.values()] if getattr(module, "time", None) is real]
    for module in places:
        module.time = jumping  # type: ignore[attr-defined]
    try:
        yield jumped
    finally:
        for module in places:
            module.time = real  # type: ignore[attr-defined]


async def _answers(bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    async with serving(FakeRunner(VOCAB_SIZE), max_queue=1000) as served:
        return list(await asyncio.gather(*(_answer(served, body) for body in bodies)))


async def _answer(served: Served, body: dict[str, Any]) -> tuple[int, Any]:
    answer = await served.client.post("/v1/completions", json=body | {"timeout_ms": 60_000})
    return answer.status_code, answer.json().get("choices", answer.text)
