"""Malformed bodies on every route: each gets an error message, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from kvasir.server.api.schemas import RequestBody
from tests.faults.bodies import OF_ENCODERS, VALID, random_body, wrong_types
from tests.faults.client import CUT, Site
from tests.faults.report import Report

_AT_ONCE = 8
_VARYING = re.compile(  # names, times, and how much of a prompt was computed before
    r'"(id|item_id|created|\w+_at|\w+_duration|(cached|input|cache_\w+)_tokens)":[^,}]*'
)


def post_routes(app: FastAPI) -> set[str]:
    paths = app.openapi()["paths"].items()
    return {path for path, of in paths if "requestBody" in of.get("post", ())}


async def malformed_bodies(site: Site, n: int, report: Report) -> None:
    """Send n bodies: half of them valid ones with a hostile value, half of the other kinds."""
    requests = _requests(n, site.chance)
    async with site.http() as client:

        async def send() -> None:
            for path, body in requests:
                await _send(client, path, body, report)

        before = [await client.post(path, json=_unstreamed(body)) for path, body in VALID.items()]
        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
        after = [await client.post(path, json=_unstreamed(body)) for path, body in VALID.items()]
        for path, one, other in zip(VALID, before, after, strict=True):
            same = _VARYING.sub("", one.text) == _VARYING.sub("", other.text)
            report.check(
                same,
                f"{path} answered a valid body with {one.text}, and afterwards with {other.text}",
            )
            expected = 400 if path in OF_ENCODERS else 200  # the model makes no vectors
            report.check(
                one.status_code == expected, f"{path} answered a valid body with {one.text}"
            )


def _unstreamed(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without what cuts its answer into pieces as they come."""
    kept = {name: value for name, value in body.items() if not name.startswith("stream")}
    return kept | {"stream": False}  # which Ollama's routes need


def _requests(n: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    fields = _all_fields(RequestBody)
    wrong = [(path, body) for path, valid in VALID.items() for body in wrong_types(valid, fields)]
    yield from chance.sample(wrong, min(n // 2, len(wrong)))
    for _ in range(n - min(n // 2, len(wrong))):
        path = chance.choice(list(VALID))
        yield path, random_body(chance, VALID[path])


def _all_fields(kind: type[RequestBody]) -> set[str]:
    return set(kind.model_fields).union(*map(_all_fields, kind.__subclasses__()))


async def _send(client: httpx.AsyncClient, path: str, body: bytes, report: Report) -> None:
    shown = f"{path} {body[:300]!r}"
    try:
        answer = await client.post(path, content=body)
    except httpx.HTTPError as error:
        report.answered(CUT, f"{shown}: {error!r}", 200)
        return
    report.statuses[answer.status_code] += 1
    report.tried += 1
    if answer.status_code == 200:
        report.check(_is_whole(answer), f"{shown}: an answer without an end: {answer.text[-300:]}")
    elif not (answer.status_code == 504 and b"timeout_ms" in body):
        is_refusal = 400 <= answer.status_code < 500 and "error" in answer.json()
        report.check(is_refusal, f"{shown}: {answer.status_code} {answer.text[:300]}")


def _is_whole(answer: httpx.Response) -> bool:
    if answer.headers["content-type"] == "application/x-ndjson":
        last = json.loads(answer.text.splitlines()[-1])
        return "error" in last or last["done"] is True
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return isinstance(answer.json(), dict | list)
    last = [line for line in answer.text.split("\n") if line][-1]
    ends = ("[DONE]", '"generated_text":"', '"message_stop"', '"type":"response.')
    return any(end in last for end in ends)
