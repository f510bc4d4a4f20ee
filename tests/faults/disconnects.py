"""Clients that leave at random moments: nothing of them stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

from tests.fake_runner import FakeRunner
from tests.faults.leaks import check_nothing_leaked, held
from tests.faults.report import Report, errors_logged
from tests.live import KEY, live
from tests.serving import VOCAB_SIZE

_AT_ONCE = 50
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER that closes without a farewell


def disconnects(n: int, seed: int = 0) -> Report:
    """n clients that leave: connecting, in mid-upload, queued, before the first token, in mid-stream."""
    report = Report("clients that leave", n)
    with (
        errors_logged() as errors,
        live(FakeRunner(VOCAB_SIZE, max_num_seqs=4), max_queue=1000) as served,
    ):
        chance = random.Random(seed)
        asyncio.run(_leave_all(served.port, chance, n // 4))  # to fill the pools that stay
        before = held(served)
        asyncio.run(_leave_all(served.port, chance, n))
        check_nothing_leaked(report, before, held(served))
        report.lost += errors
    return report


async def _leave_all(port: int, chance: random.Random, n: int) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def client() -> None:
        async with places:
            await _leave(port, chance)

    await asyncio.gather(*(client() for _ in range(n)))


async def _leave(port: int, chance: random.Random) -> None:
    """Send a request or a part of it, wait a little or for a part of the answer, and go, politely or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request(chance)
    is_whole = chance.random() < 0.8
    writer.write(request if is_whole else request[: chance.randrange(len(request))])
    for _ in range(chance.choice((0, 1, 10, 100))):
        await asyncio.sleep(0)
    if is_whole and chance.random() < 0.5:
        await reader.readexactly(chance.randrange(1, 50))
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


def _request(chance: random.Random) -> bytes:
    n_tokens = chance.randint(1, 40)
    parameters = {"ignore_eos": True, "max_new_tokens": n_tokens}
    more = {"max_tokens": n_tokens, "ignore_eos": True}
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        (
            "/v1/completions",
            {"prompt": "def read" * 4, "stream": True, "n": chance.randint(1, 3)} | more,
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1} | more),
        ("/generate_stream", {"inputs": "a", "parameters": parameters}),
    )
    path, fields = chance.choice(bodies)
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
