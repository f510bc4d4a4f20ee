"""Requests that cost much: large answers and bodies, long texts, grammars, and too many of all."""

from __future__ import annotations

import asyncio
import json
import random
import string
from typing import Any

from tests.faults.client import Site, ask, connected, post
from tests.faults.large_bodies import all_cases, body_of
from tests.faults.report import Report
from tests.faults.victim import OTHER_KEY

_PROMPTS, _SIZE = 64, 1200  # of an answer of 100 MB: prompts, and characters of each
_PAUSE = 0.2  # seconds until a client that was refused asks again
_LONG = 2**20  # characters, of which the queue of texts holds few
_SCORED = {"max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
_MANY = {"n": 16, "max_tokens": 400, "ignore_eos": True}
_CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
_DETAILS = {
    "max_new_tokens": 50,
    "details": True,
    "decoder_input_details": True,
    "top_n_tokens": 20,
}
_ANSWERED = (200, 400, 413, 429)


async def large_answers(site: Site, n: int, report: Report) -> None:
    """Ask for n answers of up to 120 MB, two at once, as every protocol gives them."""
    sizes: list[int] = []
    bodies = (_large(i, site.chance) for i in range(n))

    async def client() -> None:
        for path, body in bodies:
            while (answer := await ask(site, post(path, body))).status == 429:
                report.answered(429, "beside another")
                await asyncio.sleep(_PAUSE)
            sizes.append(answer.n_bytes)
            report.answered(answer.status, f"{path} of {len(str(body))} characters")

    await asyncio.gather(client(), client())
    report.note = f"at most {max(sizes) / 2**20:.0f} MiB in an answer"


def _large(i: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    texts = ["".join(chance.choices(string.ascii_lowercase, k=_SIZE)) for _ in range(_PROMPTS)]
    kinds = (
        ("/v1/completions", {"prompt": texts, "return_token_ids": True} | _SCORED),
        ("/v1/completions", {"prompt": texts[0], "n": 16} | _SCORED),
        ("/v1/completions", {"prompt": "def read", "logprobs": 20} | _MANY),
        ("/v1/chat/completions", _CHAT | _MANY),
        ("/generate", {"inputs": texts[0], "parameters": _DETAILS}),
    )
    return kinds[i % len(kinds)]


async def large_bodies(site: Site, n: int, report: Report) -> None:
    """Send n bodies of the largest size, one after the other."""
    for case in all_cases(n, site.chance):
        answer = await ask(site, post(case[0], body_of(*case)))
        report.answered(answer.status, str(case), *_ANSWERED, 404)


async def abandoned_texts(site: Site, n: int, report: Report) -> None:
    """Send n long texts, ten at once, and leave; then an ordinary one is answered."""
    request = post("/tokenize", {"prompt": "a" * _LONG})

    async def leave(seconds: float) -> None:
        async with connected(site) as (reader, writer):
            writer.write(request)
            try:
                async with asyncio.timeout(seconds):
                    await reader.read(1)
            except TimeoutError:
                report.tried += 1

    for _ in range(n // 10):
        await asyncio.gather(*(leave(site.chance.uniform(0.0, 0.1)) for _ in range(10)))
        answer = await ask(site, post("/tokenize", {"prompt": "def read" * 700}, OTHER_KEY))
        report.answered(answer.status, "an ordinary text", 200, 429)


async def hostile_grammars(site: Site, n: int, report: Report) -> None:
    """Send n costly grammars at once, and a known one among them, which does not wait for them."""
    known = post("/v1/completions", {"prompt": "a", "max_tokens": 2, "regex": "a"})
    report.answered((await ask(site, known)).status, "a grammar", 200)
    bodies = [{"prompt": "a", "max_tokens": 2} | _costly(i) for i in range(n)]
    costly = [asyncio.ensure_future(ask(site, post("/v1/completions", body))) for body in bodies]
    report.answered((await ask(site, known)).status, "a known grammar", 200, 429)
    report.check(not all(one.done() for one in costly), "a known grammar waits for unknown ones")
    for answer in await asyncio.gather(*costly):
        report.answered(answer.status, "a costly grammar", 400, 429, 503)


def _costly(i: int) -> dict[str, Any]:
    patterns = [{"pattern": f"{i}a.{{{k}}}b"} for k in range(2, 30)]
    schema = {"name": "a", "schema": {"allOf": patterns}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


async def overload(site: Site, n: int, report: Report) -> None:
    """Send n requests from a crowd ten times as large as what runs and waits."""
    body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
    requests, n_served = iter(range(n)), 0

    async def client() -> None:
        for _ in requests:
            answer = await ask(site, post("/v1/completions", body))
            report.answered(answer.status, "a client of the crowd", 200, 429)

    await asyncio.gather(*(client() for _ in range(min(n, 800))))
    n_served = report.statuses[200]
    report.note = f"{n_served} of a crowd's {n} served"
    report.check(n_served > 0, report.note)


async def invalid_requests(site: Site, n: int, report: Report) -> None:
    """Send n requests that are refused, 200 a second."""
    wrong = ({"temperature": -1}, {"surprise": 1}, {"max_tokens": "many"}, {"max_tokens": 10**6})
    invalid = [b"{", b"\xff\xfe\0", *(json.dumps({"prompt": "a"} | one).encode() for one in wrong)]
    asked: list[asyncio.Future[Any]] = []
    for i in range(n):
        asked.append(asyncio.ensure_future(ask(site, post("/v1/completions", invalid[i % 6]))))
        await asyncio.sleep(1 / 200)
    for answer in await asyncio.gather(*asked):
        report.answered(answer.status, "an invalid request", 400)
