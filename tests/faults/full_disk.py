"""Logs that cannot be written: requests are still answered."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from pathlib import Path

from kvasir.server.process.local_server import serve_command
from kvasir.server.process.serve import bind
from tests.fake_runner import TIMEOUT
from tests.faults.probe import EXAMPLE
from tests.faults.report import Report
from tests.faults.server_process import Stream, serving_example

_LONG_PATH = (
    f"GET /{'x' * 16_000} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
)


def full_disk(n: int, _seed: int = 0) -> Report:
    """Send n requests each while standard error is a full device, a closed or a full pipe."""
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
        subprocess.Popen(serve_command(EXAMPLE, "--port", str(port)), stderr=full) as process,
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
    """Make the server log more than a pipe holds."""
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(TIMEOUT):
            writer.write(_LONG_PATH)
            await reader.read()
        writer.close()


async def _ask(port: int, n: int) -> Counter[str]:
    return Counter([await _stream_when_up(port) for _ in range(n)])


async def _stream_when_up(port: int) -> str:
    """Return how a stream ended. Retries until the server is up, which no log line announces."""
    async with asyncio.timeout(TIMEOUT):
        while (how := await Stream(port, max_tokens=3).read()) == "refused":  # noqa: ASYNC110
            await asyncio.sleep(0)
    return how
