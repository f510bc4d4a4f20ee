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


def ends(n: int, seed: int = 0) -> Report:
    """Kill a server under load, and terminate another on its port, n times.

    Streams of the first are cut, and nothing of it is left. Those of the second end, be the time
    to drain too short or long enough.
    """
    report, chance, port = Report("kill -9 and SIGTERM under load"), random.Random(seed), 0
    killed, terminated = Counter[str](), Counter[str]()
    for i in range(n):
        with closing(ServerProcess(port)) as server:
            port = server.port
            process = psutil.Process(server.popen.pid)
            family = [process, *process.children(recursive=True)]
            killed += asyncio.run(_end_under_load(server, signal.SIGKILL, chance, 200))
            _, alive = psutil.wait_procs(family, TIMEOUT)
            report.check(not alive, f"processes outlive it: {alive}")
        with closing(ServerProcess(port, "--drain-timeout", ("0.05", "30")[i % 2])) as server:
            terminated += asyncio.run(_end_under_load(server, signal.SIGTERM, chance, 100))
            code = server.wait()
            report.check(code == 0, f"it ended with {code}")
    report.lost += ["a client hangs"] * killed["hangs"]
    report.lost += [f"a stream {how}" for how in ("cut", "hangs") for _ in range(terminated[how])]
    report.check(killed["cut"] > 0 and terminated["whole"] > 0, "no stream was running")
    report.tried = killed.total() + terminated.total()
    report.note = f"killed: {dict(killed)}; terminated: {dict(terminated)}"
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
