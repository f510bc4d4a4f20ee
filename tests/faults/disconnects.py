"""Clients that disconnect at random moments, after which the server must hold nothing of them."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import Any

from tests.faults.canary import apart, canary
from tests.faults.leaks import check_nothing_leaked, held
from tests.faults.paced_runner import PacedRunner
from tests.faults.report import Report, errors_logged
from tests.faults.server_process import post_request
from tests.live import KEY, live

_AT_ONCE = 50
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER that closes with a reset


def disconnects(n: int, seed: int = 0) -> Report:
    """Disconnect n clients connecting, uploading, queued, before the first token, in mid-stream."""
    report = Report("clients that disconnect", n)
    runner = PacedRunner(max_num_seqs=5)
    with errors_logged() as errors, live(runner, max_queue=1000) as served:
        apart(report, _disconnect_all, served.port, n // 4, seed)  # fills the pools that stay
        before = held(served)
        with canary(report, served.port, tokens=50, key=KEY):
            apart(report, _disconnect_all, served.port, n, seed + 1)
        check_nothing_leaked(report, before, held(served))
        report.lost += errors
    return report


async def _disconnect_all(_report: Report, port: int, n: int, seed: int) -> None:
    places, chance = asyncio.Semaphore(_AT_ONCE), random.Random(seed)

    async def client() -> None:
        async with places:
            await _disconnect(port, chance)

    await asyncio.gather(*(client() for _ in range(n)))


async def _disconnect(port: int, chance: random.Random) -> None:
    """Send a request or a part of it, wait or read a little, then close or reset."""
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
    common = {"max_tokens": n_tokens, "ignore_eos": True}
    stream = {"prompt": "def read" * 4, "stream": True, "n": chance.randint(1, 3)}
    scored = {"prompt": ["a", "b"], "echo": True, "logprobs": 1}
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", stream | common),
        ("/v1/completions", scored | common),
        ("/generate_stream", {"inputs": "a", "parameters": parameters}),
    )
    return post_request(*chance.choice(bodies), f"Authorization: Bearer {KEY}")
