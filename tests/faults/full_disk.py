"""Logs that cannot be written: requests are still answered."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import suppress

from kvasir.server.process.local_server import serve_command, wait_until_ready
from tests.faults.client import stream
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE
from tests.kit.fake_runner import TIMEOUT


def full_disk(n: int, _seed: int = 0) -> Report:
    """Send n requests while standard error is a full pipe; if n > 1, also a closed one."""
    report = Report("logs that cannot be written")
    for what in ("full pipe", "closed pipe")[:n]:
        reading, writing = os.pipe()
        with (
            os.fdopen(reading) as log,
            subprocess.Popen(serve_command(EXAMPLE), stderr=writing) as process,
        ):
            try:
                port = int(wait_until_ready(log)["port"])
                if what == "closed pipe":
                    log.close()
                else:
                    _fill(writing)
                for _ in range(n):
                    end = asyncio.run(stream(port, max_tokens=3))
                    report.tried += 1
                    report.check(end == "whole", f"with a {what} a stream is {end}")
            finally:
                os.close(writing)
                process.terminate()
            code = process.wait(TIMEOUT)
        report.check(code == 0, f"with a {what} it ended with {code}")
    return report


def _fill(pipe: int) -> None:
    """Write until nothing fits. Who shares the pipe waits for room again afterwards."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while os.write(pipe, bytes(2**12)):
            pass
    os.set_blocking(pipe, True)
