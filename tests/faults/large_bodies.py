"""Bodies of the largest size, of every shape: none holds the event loop, or takes much memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from kvasir.server.api.http.body import MOST_IN_BODY
from tests.fake_runner import FakeRunner
from tests.faults.bodies import VALID, places, put
from tests.faults.report import Report, errors_logged
from tests.faults.victim import figure
from tests.serving import VOCAB_SIZE, serving

SIZE = 4 * 2**20  # the usual limit
_STATUSES = (200, 400, 404, 429)
_HERE = json.dumps("\u2620here").encode()
# The goal is 0.05 and 10; a run of this process on a busy machine, and in pages of 4 KB, varies.
_MOST_SECONDS, _MOST_TIMES = 0.25, 12.0
_CALL = b'{"function":{"name":"f","arguments":"{}"}}'
_TOOL = b'{"type":"function","function":{"name":"f"}}'

# Repeated in an array.
_ITEMS = {
    "numbers": b"1",
    "long numbers": b"1" * 4300,
    "floats": b"1.2345678901234567",
    "strings": b'"ab"',
    "arrays": b"[]",
    "objects": b"{}",
    "arrays of numbers": b"[1]",
    "deep arrays": b"[" * 100 + b"]" * 100,
    "messages": b'{"role":"user","content":"a"}',
    "parts": b'{"type":"text","text":"a"}',
    "calls": _CALL,
    "tools": _TOOL,
}
# Repeated in a string.
_PARTS = {
    "text": b"a",
    "wide text": "\U0001f600".encode(),
    "text of commas": b",",
    "text of arrays": b"[],",
    "text of quotes": rb"\"",
    "text of lines": rb"\n",
    "escapes": rb"\u00e9",
}
Place = tuple[str | int, ...]
Case = tuple[str, Place, str]
_WORST: tuple[Case, ...] = (  # a place and what fills it
    ("/v1/chat/completions", ("messages",), "numbers"),
    ("/v1/chat/completions", ("messages",), "messages"),
    ("/v1/chat/completions", ("messages", 1, "content"), "parts"),
    ("/v1/chat/completions", ("messages", 2, "tool_calls"), "calls"),
    ("/v1/chat/completions", ("tools",), "numbers"),
    ("/v1/chat/completions", ("tools", 0, "function", "parameters"), "keys"),
    ("/v1/completions", ("prompt",), "arrays of numbers"),
    ("/v1/completions", ("prompt",), "numbers"),
    ("/v1/completions", ("prompt",), "arrays"),
    ("/v1/completions", ("logit_bias",), "keys"),
    ("/v1/completions", ("unknown",), "text of commas"),
    ("/v1/completions", (), "keys"),
    ("/explain", ("layers",), "strings"),
    ("/detokenize", ("tokens",), "strings"),
    ("/detokenize", ("tokens",), "numbers"),
    ("/tokenize", ("prompt",), "text"),
)


def large_bodies(n: int, seed: int = 0) -> Report:
    """Send n bodies: the worst ones first, then any shape in any place.

    Of each there are two: one of the largest size, and the largest that is parsed.
    """
    report = Report("large bodies")
    with errors_logged() as errors:
        gc.freeze()  # as `serve` does
        asyncio.run(_measure_all(n, seed, report))
        gc.unfreeze()
    report.lost += errors
    return report


async def _measure_all(n: int, seed: int, report: Report) -> None:
    highest = [0.0, 0.0]
    async with serving(FakeRunner(VOCAB_SIZE, max_model_len=400)) as served:
        for case in all_cases(n, random.Random(seed)):
            path, body = case[0], body_of(*case)
            status, seconds, times = await measured(served.app, path, body)
            report.tried += 1
            shown = (
                f"{case}: status {status}, {seconds:.3f} s of the loop, {times:.1f} times its size"
            )
            good = status in _STATUSES
            report.check(good and seconds < _MOST_SECONDS and times < _MOST_TIMES, shown)
            highest = [max(highest[0], seconds), max(highest[1], times)]
    report.note = (
        f"at most {highest[0] * 1000:.0f} ms of the event loop, and {highest[1]:.1f} times the "
        "size of a body"
    )


async def measured(app: FastAPI, path: str, body: bytes) -> tuple[int, float, float]:
    """Post a body; return the status, the loop's CPU seconds, and the peak memory by its size."""
    sent: list[Message] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
    }
    scope |= {"headers": [], "query_string": b"", "root_path": "", "http_version": "1.1"}
    before, started = _reset_peak(), thread_time()
    await app(scope | {"server": ("test", 80), "client": ("test", 1)}, receive, send)
    seconds, grown = thread_time() - started, figure(os.getpid(), "VmHWM") - before
    return sent[0]["status"], seconds, max(0, grown) / SIZE


def _reset_peak() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # else a request may use what others have left
    Path("/proc/self/clear_refs").write_text("5")
    return figure(os.getpid(), "VmRSS")


def all_cases(n: int, chance: random.Random) -> Iterator[tuple[str, Place, str, bool]]:
    cases = _cases(chance)
    return islice(((*case, fits) for case in cases for fits in (False, True)), n)


def _cases(chance: random.Random) -> Iterator[Case]:
    yield from _WORST
    shapes = [*_ITEMS, *_PARTS, "keys", "opened arrays", "digits"]
    while True:
        path = chance.choice(list(VALID))
        place = chance.choice([(), ("unknown",), *places(VALID[path])])
        yield path, place, chance.choice(shapes)


def body_of(path: str, place: Place, shape: str, fits: bool) -> bytes:
    outside = json.dumps(put(VALID[path], place, json.loads(_HERE))).encode()
    room = SIZE - len(outside)
    if shape == "keys" and fits:
        room = min(room, 13 * (MOST_IN_BODY[0][2] // 2 - 100))
    if shape not in _ITEMS:
        return outside.replace(_HERE, _value(shape, room))
    item = _ITEMS[shape] + b","
    n = (room - 2) // len(item)
    for _, marks, most in MOST_IN_BODY if fits else ():
        in_item, in_rest = (sum(map(text.count, marks)) for text in (item, outside))
        n = min(n, (most - in_rest - 1) // in_item) if in_item else n
    return outside.replace(_HERE, b"[" + (item * n)[:-1] + b"]")


def _value(shape: str, room: int) -> bytes:
    """Return a value of this length that is no array of equal items."""
    if shape == "keys":
        return b"{" + b",".join(b'"k%07d":1' % i for i in range(room // 13)) + b"}"
    if shape == "opened arrays":
        return b"[" * room
    if shape == "digits":
        return b"1" * room
    part = _PARTS[shape]
    return b'"' + part * ((room - 2) // len(part)) + b'"'
