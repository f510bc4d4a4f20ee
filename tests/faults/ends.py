"""Servers killed or terminated while clients stream: no client hangs, and nothing is left.

There is no canary: its stream would end with the server, as those of the clients do.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from contextlib import closing

import psutil

from tests.faults.client import stream
from tests.faults.report import Report
from tests.faults.server_process import ServerProcess
from tests.kit.fake_runner import TIMEOUT

_CLIENTS = 24  # more than run at once


def kills(n: int, seed: int = 0) -> Report:
    """Kill n servers on one port under load: their streams are cut, and nothing of them is left."""
    report, chance, port = Report("kill -9 under load"), random.Random(seed), 0
    streams = Counter[str]()
    for _ in range(n):
        with closing(ServerProcess(port)) as server:
            port = server.port
            process = psutil.Process(server.popen.pid)
            family = [process, *process.children(recursive=True)]
            streams += asyncio.run(_end_under_load(server, signal.SIGKILL, chance, 200))
            _, alive = psutil.wait_procs(family, TIMEOUT)
            report.check(not alive, f"processes outlive it: {alive}")
    report.lost += ["a client hangs"] * streams["hangs"]
    report.check(streams["cut"] > 0, "no stream was running")
    report.tried, report.note = streams.total(), f"{dict(streams)}"
    return report


def terminations(n: int, seed: int = 0) -> Report:
    """Terminate n servers: streams end, be the time to drain too short or long enough."""
    report, chance = Report("SIGTERM under load"), random.Random(seed)
    streams = Counter[str]()
    for i in range(n):
        with closing(ServerProcess(0, "--drain-timeout", ("0.05", "30")[i % 2])) as server:
            streams += asyncio.run(_end_under_load(server, signal.SIGTERM, chance, 100))
            code = server.wait()
            report.check(code == 0, f"it ended with {code}")
    report.lost += [f"a stream {how}" for how in ("cut", "hangs") for _ in range(streams[how])]
    report.check(streams["whole"] > 0, "no stream was running")
    report.tried, report.note = streams.total(), f"{dict(streams)}"
    return report


async def _end_under_load(
    server: ServerProcess, how: signal.Signals, chance: random.Random, most: int
) -> Counter[str]:
    """Signal a server when some clients have begun to read; count the ways in which streams end."""
    begun = [asyncio.Event() for _ in range(_CLIENTS)]
    running = [
        asyncio.ensure_future(
            stream(server.port, one, max_tokens=chance.randint(1, most), n=chance.randint(1, 2))
        )
        for one in begun
    ]
    for one in chance.sample(begun, chance.randint(1, 8)):
        await one.wait()
    server.popen.send_signal(how)
    return Counter(await asyncio.gather(*running))
