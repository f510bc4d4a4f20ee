"""Servers killed or terminated while clients stream: no client hangs, and the next server works.

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
    """Kill n servers on one port under load: streams are cut, nothing is left."""
    report = Report("kill -9 under load")
    chance, ends, port = random.Random(seed), Counter[str](), 0
    for _ in range(n):
        with closing(ServerProcess(port)) as server:
            port = server.port
            process = psutil.Process(server.popen.pid)
            family = [process, *process.children(recursive=True)]
            ends += asyncio.run(_end_under_load(server, signal.SIGKILL, chance, 200))
            _, alive = psutil.wait_procs(family, TIMEOUT)
            report.check(not alive, f"processes outlive it: {alive}")
    with closing(ServerProcess(port)) as server:
        last = asyncio.run(stream(server.port, max_tokens=5))
        report.check(last == "whole", f"after the last restart a stream is {last}")
    report.lost += ["a client hangs"] * ends["hangs"]
    report.check(ends["cut"] > 0, "no stream was running")
    return _summarise(report, ends)


def terminations(n: int, seed: int = 0) -> Report:
    """Send SIGTERM under load, n times, with enough and with too little time: each stream ends."""
    report = Report("SIGTERM under load")
    chance, ends = random.Random(seed), Counter[str]()
    for i in range(n):
        with closing(ServerProcess(0, "--drain-timeout", str((0.05, 30.0)[i % 2]))) as server:
            ends += asyncio.run(_end_under_load(server, signal.SIGTERM, chance, 100))
            code = server.wait()
            report.check(code == 0, f"it ended with {code}")
    report.lost += [f"a stream {how}" for how in ("cut", "hangs") for _ in range(ends[how])]
    report.check(ends["whole"] > 0, "no stream was running")
    return _summarise(report, ends)


def _summarise(report: Report, ends: Counter[str]) -> Report:
    report.tried = ends.total()
    report.note = ", ".join(f"{count} {how}" for how, count in ends.most_common())
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
