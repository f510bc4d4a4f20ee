"""Grammars that cost too much, and the end of the process that tries them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest.mock import patch

import httpx

from model.limited_process import LimitedProcess
from server.requests.grammars import _WAIT_SECONDS, Grammars
from tests.fake_runner import TIMEOUT
from tests.faults.canary import apart, canary
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report
from tests.live import KEY, live

_MOST_MIB = 64  # by which the server may grow


def hostile_grammars(n: int, _seed: int = 0) -> Report:
    """Send n costly grammars at once, a known one among them, and kill the process of trials."""
    report = Report("hostile grammars", n)
    with live(PacedRunner(max_model_len=400), max_queue=n + 1) as served, served.http() as client:
        _post(client, regex="a")
        with canary(report, served.port, tokens=390, key=KEY):
            apart(report, _attack, served.url, n)
        _kill(served.service.grammars, client, report)
    grown = (report.grown or 0) / 2**20
    report.check(grown < _MOST_MIB, f"the server grew by {grown:.0f} MiB")
    return report


async def _attack(report: Report, url: str, n: int) -> None:
    headers, seconds = {"authorization": f"Bearer {KEY}"}, TIMEOUT + _WAIT_SECONDS
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=seconds, limits=limits
    ) as client:
        attacks = [asyncio.ensure_future(_post(client, **_costly(i))) for i in range(n)]
        known = await _post(client, regex="a")
        report.check(known.status_code == 200, f"a known grammar gets {known.text}")
        report.check(not all(a.done() for a in attacks), "a known grammar waits for unknown ones")
        answers = [await attack for attack in attacks]
        ends = Counter(answer.status_code for answer in answers)
        report.lost += [a.text for a in answers if a.status_code not in (400, 429, 503)]
        counts = f"{ends[400]} too costly, {ends[429]} too many"
        report.note = f"{counts}, {ends[503]} not tried in time"


def _kill(grammars: Grammars, client: httpx.Client, report: Report) -> None:
    trial = grammars._trial
    start = trial.start

    def start_and_kill() -> LimitedProcess:
        process = start()
        process.process.kill()
        process.process.wait()
        return process

    with patch.object(trial, "start", start_and_kill):
        killed = _post(client, regex="b")
    report.check(killed.status_code == 503, f"killed, a trial gives {killed.status_code}")
    other = _post(client, regex="b")
    report.check(other.status_code == 200, f"afterwards, a grammar gets {other.text}")


def _costly(i: int) -> dict[str, Any]:
    patterns = [{"pattern": f"{i}a.{{{k}}}b"} for k in range(2, 30)]
    schema = {"name": "a", "schema": {"allOf": patterns}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _post(client: httpx.Client | httpx.AsyncClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": [5, 7], "max_tokens": 2} | body)
