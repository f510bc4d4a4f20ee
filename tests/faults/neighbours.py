"""Keys that work against another key of the same server: one that spies, one that takes all."""

from __future__ import annotations

import asyncio
import random
import re
from time import perf_counter
from typing import Any

import httpx

from tests.faults.client import Site
from tests.faults.report import Report
from tests.faults.victim import GREEDY_KEY, KEY, QUOTA, SPY_KEY

_GREEDY = 8  # requests that it sends at once
_PER_ROUND = 2 + _GREEDY
_VOCAB_SIZE, _MAX_LEN = 2048, 1024  # of the example


async def neighbours(site: Site, n: int, report: Report) -> None:
    """Send n requests: the spy finds no prompt of the victim, the greedy key keeps to its quota."""
    started, before = perf_counter(), await _used(site)
    async with site.http(None) as client:

        async def ask(key: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            report.answered(answer.status_code, f"{key}: {answer.text[:200]}", 200, 429)
            return answer

        for _ in range(max(1, n // _PER_ROUND)):
            secret = [site.chance.randrange(1, _VOCAB_SIZE) for _ in range(16)]
            greedy = [
                asyncio.create_task(ask(GREEDY_KEY, **_large(site.chance))) for _ in range(_GREEDY)
            ]
            told = await ask(KEY, prompt=secret, max_tokens=1)
            report.check(told.status_code == 200, f"the victim got {told.status_code}")
            salt = site.chance.choice((None, "a", KEY))
            guess = await ask(SPY_KEY, prompt=secret, max_tokens=1, cache_salt=salt)
            found = guess.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            report.check(found == 0, f"the spy learnt {found} tokens")
            for answer in await asyncio.gather(*greedy):
                is_told = answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                is_served = answer.status_code == 200
                report.check(is_served or is_told, f"the greedy key got {answer.text[:300]}")
    allowed = QUOTA * (1 + (perf_counter() - started) / 60) + 4 * _MAX_LEN
    used = await _used(site) - before
    report.note = f"the greedy key used {used:.0f} tokens of {allowed:.0f}"
    report.check(used <= allowed, report.note)


async def _used(site: Site) -> float:
    async with site.http() as client:
        metrics = (await client.get("/metrics")).text
    told = re.findall(r'^kvasir_key_tokens_total\{.*key="greedy".*\} (\S+)$', metrics, re.MULTILINE)
    return sum(map(float, told))


def _large(chance: random.Random) -> dict[str, Any]:
    ways: tuple[dict[str, Any], ...] = (
        {"ignore_eos": True},
        {"max_tokens": 40, "n": 4, "ignore_eos": True},
        {"stream": True, "max_tokens": 40},
        {"regex": "[a-z]{20,30}"},
    )
    return {"prompt": "a" * chance.randrange(1, 20)} | chance.choice(ways)
