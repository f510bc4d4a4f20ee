"""Logs that cannot be written: requests are answered all the same."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from pathlib import Path

from server.process.serve import bind
from tests.fake_runner import TIMEOUT
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE, Stream, command, serving_example

_LONG_PATH = f"GET /{'x' * 16_000} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def full_disk(n: int, _seed: int = 0) -> Report:
    """n requests each while standard error is a device without room, a pipe that is closed, and one that is full."""
    report = Report("logs that cannot be written", 3 * n)
    ends = Counter[str]()
    for is_closed in (True, False):
        with serving_example(follows=False) as server:
            if is_closed:
                server.stderr.close()
            else:
                asyncio.run(_fill(server.port))
            ends += asyncio.run(_ask(server.port, n))
            server.popen.send_signal(signal.SIGTERM)
            code = server.popen.wait(TIMEOUT)
            report.check(
                code == 0, f"with a {'closed' if is_closed else 'full'} pipe it ended with {code}"
            )
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command(EXAMPLE, port), stderr=full) as process,
    ):
        try:
            ends += asyncio.run(_ask(port, n))
        finally:
            process.terminate()
    report.lost += [
        f"a stream is {how}" for how, count in ends.items() if how != "whole" for _ in range(count)
    ]
    return report


async def _fill(port: int) -> None:
    """Let the server log what it was asked for, until there is more than a pipe holds."""
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(TIMEOUT):
            writer.write(_LONG_PATH)
            await reader.read()
        writer.close()


async def _ask(port: int, n: int) -> Counter[str]:
    return Counter([await _patiently(port) for _ in range(n)])


async def _patiently(port: int) -> str:
    """How a stream ended, once there is a server: without a log only a connection tells."""
    async with asyncio.timeout(TIMEOUT):
        while (how := await Stream(port, max_tokens=3).run()) == "refused":  # noqa: ASYNC110
            await asyncio.sleep(0)
    return how
