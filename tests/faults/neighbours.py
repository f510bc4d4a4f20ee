"""Keys that work against another key of the same server: one that spies, one that takes all."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from tests.fake_runner import TIMEOUT
from tests.faults.canary import apart, canary
from tests.faults.leaks import held
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.live import live
from tests.serving import VOCAB_SIZE

_QUOTA = 300  # tokens a minute of the greedy key
_GREEDY = 8  # requests that it sends at once
_PER_ROUND = 2 + _GREEDY
_KEYS = f"v-key\nname=spy s-key\nname=greedy tokens_per_minute={_QUOTA} g-key\ncanary-key\n"


def neighbours(n: int, seed: int = 0) -> Report:
    """Send n requests: the spy finds no prompt of the victim, the greedy key keeps to its quota."""
    report = Report("hostile neighbours")
    with tempfile.TemporaryDirectory() as folder, errors_logged() as errors:
        path = Path(folder) / "keys"
        path.write_text(_KEYS)
        runner = PacedRunner(max_num_seqs=_PER_ROUND + 1)
        with live(runner, cache_bytes=2**20, api_key_file=path, max_queue=100) as served:
            started = perf_counter()
            with canary(report, served.port, tokens=50, key="canary-key"):
                apart(report, _work, served.url, n, seed)
            held(served)
            allowed = _QUOTA * (1 + (perf_counter() - started) / 60) + runner.max_model_len * 4
            kinds = ("prompt", "completion")
            used = sum(served.value("key_tokens_total", key="greedy", kind=one) for one in kinds)
            report.note = f"the greedy key used {used:.0f} tokens of {allowed:.0f}"
            report.check(0 < used <= allowed, report.note)
            report.check(served.service.admission.n_inside == 0, "places are still held")
        report.lost += errors
    return report


async def _work(report: Report, url: str, n: int, seed: int) -> None:
    chance = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:

        async def ask(key: str, **body: Any) -> httpx.Response:
            report.tried += 1
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/completions", json=body, headers=headers)

        for _ in range(max(1, n // _PER_ROUND)):
            secret = [chance.randrange(1, VOCAB_SIZE) for _ in range(16)]
            greedy = [asyncio.create_task(ask("g-key", **_large(chance))) for _ in range(_GREEDY)]
            told = await ask("v-key", prompt=secret, max_tokens=1)
            report.check(told.status_code == 200, f"the victim got {told.status_code}")
            salt = chance.choice((None, "victim", "v-key"))
            guess = await ask("s-key", prompt=secret, max_tokens=1, cache_salt=salt)
            found = guess.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            report.check(found == 0, f"the spy learnt {found} tokens")
            for answer in await asyncio.gather(*greedy):
                is_told = answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                is_served = answer.status_code == 200
                report.check(is_served or is_told, f"the greedy key got {answer.text[:300]}")


def _large(chance: random.Random) -> dict[str, Any]:
    ways: tuple[dict[str, Any], ...] = (
        {"ignore_eos": True},
        {"max_tokens": 40, "n": 4, "ignore_eos": True},
        {"stream": True, "max_tokens": 40},
        {"regex": "[a-z]{20,30}"},
    )
    return {"prompt": "a" * chance.randrange(1, 20)} | chance.choice(ways)
