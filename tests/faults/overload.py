"""Ten times as many requests as fit: some are answered at full speed, the others get 429."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.fake_runner import TIMEOUT, FakeRunner
from tests.faults.report import Report
from tests.serving import VOCAB_SIZE, Served, serving

_SEQUENCES, _QUEUE, _TOKENS = 4, 12, 40
_CAPACITY = _SEQUENCES + _QUEUE
_TIMES = 10
_BODY: dict[str, Any] = {"prompt": "a", "max_tokens": _TOKENS, "ignore_eos": True}
_GOODPUT = 0.9  # of the peak, which is all rows in every step


def overload(n: int, _seed: int = 0) -> Report:
    """Send n requests in waves of ten times what the server takes."""
    report = Report("overload, ten times")
    asyncio.run(_serve(n, report))
    return report


async def _serve(n: int, report: Report) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=_SEQUENCES)
    async with serving(runner, max_queue=_QUEUE) as served:
        for _ in range(max(1, n // (_TIMES * _CAPACITY))):
            async with asyncio.timeout(TIMEOUT):
                await _send_wave(served, report)
    goodput = sum(n_decode for n_decode, _ in runner.batches) / (len(runner.batches) * _SEQUENCES)
    report.note = f"goodput {goodput:.2f} of its peak"
    report.check(goodput >= _GOODPUT, report.note)


async def _send_wave(served: Served, report: Report) -> None:
    served.runner.hold()
    n = _TIMES * _CAPACITY
    report.tried += n
    post = served.client.post
    waiting = {asyncio.ensure_future(post("/v1/completions", json=_BODY)) for _ in range(n)}
    refused: set[asyncio.Future[httpx.Response]] = set()
    while len(waiting) > _CAPACITY:  # the engine is held, so the rest has been admitted
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        refused |= done
    for answer in (one.result() for one in refused):
        text = f"a request too many got {answer.status_code} {answer.text}"
        report.check(_is_refused(answer), text)
    served.runner.release()
    for answer in await asyncio.gather(*waiting):
        text = f"an admitted request got {answer.status_code} {answer.text}"
        report.check(_is_whole(answer), text)


def _is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


def _is_whole(answer: httpx.Response) -> bool:
    n_tokens = answer.json().get("usage", {}).get("completion_tokens")
    return (answer.status_code, n_tokens) == (200, _TOKENS)
