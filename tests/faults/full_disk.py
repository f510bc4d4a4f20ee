"""Logs that cannot be written: requests are still answered."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvasir.server.process.local_server import serve_command
from kvasir.server.process.serve import bind
from tests.faults.client import stream
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE
from tests.kit.fake_runner import TIMEOUT


def full_disk(n: int, _seed: int = 0) -> Report:
    """Send n requests each while standard error is a full device, a full or a closed pipe."""
    report = Report("logs that cannot be written", 3 * n)
    for what, stderr in _outputs():
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        command = serve_command(EXAMPLE, "--port", str(port))
        with subprocess.Popen(command, stderr=stderr) as process:
            try:
                ends = asyncio.run(_ask(port, n))
            finally:
                process.terminate()
            code = process.wait(TIMEOUT)
        report.check(code == 0, f"with a {what} it ended with {code}")
        for how in ends.keys() - {"whole"}:
            report.lost += [f"with a {what} a stream is {how}"] * ends[how]
    return report


def _outputs() -> Iterator[tuple[str, int]]:
    """Yield descriptors to which nothing can be written, each open until the next."""
    with Path("/dev/full").open("w") as full:
        yield "full device", full.fileno()
    for what in ("full pipe", "closed pipe"):
        reading, writing = os.pipe()
        if what == "closed pipe":
            os.close(reading)
        else:
            os.set_blocking(writing, False)
            with suppress(BlockingIOError):
                while os.write(writing, bytes(2**12)):
                    pass
            os.set_blocking(writing, True)
        yield what, writing
        os.close(writing)
        if what == "full pipe":
            os.close(reading)


async def _ask(port: int, n: int) -> Counter[str]:
    return Counter([await _stream_when_up(port) for _ in range(n)])


async def _stream_when_up(port: int) -> str:
    """Return how a stream ended. Retries until the server is up, which no log line announces."""
    async with asyncio.timeout(TIMEOUT):
        while (how := await stream(port, max_tokens=3)) == "refused":  # noqa: ASYNC110
            await asyncio.sleep(0)
    return how
