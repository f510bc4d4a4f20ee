"""Grammars that cost too much, and the end of the process that tries them."""

from __future__ import annotations

import asyncio
from collections import Counter
from subprocess import Popen
from typing import Any
from unittest.mock import patch

import httpx
import psutil

from server.requests.grammars import _WAIT_SECONDS
from tests.fake_runner import TIMEOUT
from tests.faults.report import Report
from tests.serving import Served, serving

_MOST_MIB = 64  # by which the server may grow


def hostile_grammars(n: int, _seed: int = 0) -> Report:
    """Send n costly grammars at once, a known one among them, and kill the process of trials."""
    report = Report("hostile grammars", n)
    asyncio.run(_attack(n, report))
    return report


async def _attack(n: int, report: Report) -> None:
    patience = asyncio.timeout(TIMEOUT + _WAIT_SECONDS)
    async with serving(max_queue=n + 1) as served, patience:
        await _post(served, regex="a")
        memory = psutil.Process().memory_info().rss
        attacks = [asyncio.ensure_future(_post(served, **_costly(i))) for i in range(n)]
        known = await _post(served, regex="a")
        report.check(known.status_code == 200, f"a known grammar gets {known.text}")
        report.check(not all(a.done() for a in attacks), "a known grammar waits for unknown ones")
        answers = [await attack for attack in attacks]
        ends = Counter(answer.status_code for answer in answers)
        report.lost += [a.text for a in answers if a.status_code not in (400, 429, 503)]
        trial = served.service.grammars._trial
        start = trial.start

        def start_and_kill() -> Popen[bytes]:
            process = start()
            process.kill()
            process.wait()
            return process

        with patch.object(trial, "start", start_and_kill):
            killed = await _post(served, regex="b")
        report.check(killed.status_code == 503, f"killed, a trial gives {killed.status_code}")
        other = await _post(served, regex="b")
        report.check(other.status_code == 200, f"afterwards, a grammar gets {other.text}")
        grown = (psutil.Process().memory_info().rss - memory) / 2**20
        report.check(grown < _MOST_MIB, f"the server grew by {grown:.0f} MiB")
        counts = f"{ends[400]} too costly, {ends[429]} too many, {ends[503]} not tried in time"
        report.note = f"{counts}; {grown:.0f} MiB more"


def _costly(i: int) -> dict[str, Any]:
    patterns = [{"pattern": f"{i}a.{{{k}}}b"} for k in range(2, 30)]
    schema = {"name": "a", "schema": {"allOf": patterns}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


async def _post(served: Served, **body: Any) -> httpx.Response:
    everything = {"prompt": [5, 7], "max_tokens": 2} | body
    return await served.client.post("/v1/completions", json=everything)
