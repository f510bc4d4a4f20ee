"""A server for the length of a measurement ends with it, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from kvasir.server.process.local_server import run_server
from tests.kit.fake_runner import TIMEOUT

SERVER = """
import json, os, sys, time
print(os.getpid(), flush=True)
for message in ("listening", "ready"):
    print(json.dumps({"message": message, "port": 1}), file=sys.stderr, flush=True)
time.sleep(3600)
"""
MEASUREMENT = """
import asyncio, sys, uvloop
from kvasir.server.process.local_server import run_server
async def measure():
    print("measuring", flush=True)
    await asyncio.sleep(3600)
with run_server([sys.executable, "-c", sys.argv[1]]):
    uvloop.run(measure())
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_measurement_leaves_no_server(number: signal.Signals) -> None:
    """The server has a process group of its own, so a closed terminal left it behind."""
    command = [sys.executable, "-c", MEASUREMENT, SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        server = int(measurement.stdout.readline())
        assert measurement.stdout.readline() == "measuring\n"
        measurement.send_signal(number)
        try:
            measurement.communicate(timeout=TIMEOUT)  # both hold this pipe
        finally:
            measurement.kill()
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
                pytest.fail("the server lives on")
    if number != signal.SIGINT:
        assert measurement.returncode == 128 + number


def test_a_server_that_cannot_start_says_why() -> None:
    code = "import sys; sys.exit('kvasir: a has no manifest.json')"
    with (
        pytest.raises(ChildProcessError, match=r"^a has no manifest\.json$"),
        run_server([sys.executable, "-c", code]),
    ):
        pass
