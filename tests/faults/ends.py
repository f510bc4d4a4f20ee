"""A server that is killed, or told to go, while clients stream from it: nobody hangs, and the next one serves."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter

import psutil

from tests.fake_runner import TIMEOUT
from tests.faults.report import Report
from tests.faults.server_process import ServerProcess, Stream, serving_example

_CLIENTS = 24  # more than run at once


def kills(n: int, seed: int = 0) -> Report:
    """kill -9 under load n times, each time on the same port: streams are cut, and leave nothing behind."""
    report = Report("kill -9 under load")
    chance, ends, port = random.Random(seed), Counter[str](), 0
    for _ in range(n):
        with serving_example(port) as server:
            port = server.port
            family = [
                psutil.Process(server.popen.pid),
                *psutil.Process(server.popen.pid).children(recursive=True),
            ]
            ends += asyncio.run(_end_under_load(server, signal.SIGKILL, chance, 200))
            _, alive = psutil.wait_procs(family, TIMEOUT)
            report.check(not alive, f"processes outlive it: {alive}")
    with serving_example(port) as server:
        last = asyncio.run(Stream(server.port, max_tokens=5).run())
        report.check(last == "whole", f"after the last restart a stream is {last}")
    report.lost += ["a client hangs"] * ends["hangs"]
    report.check(ends["cut"] > 0, "no stream was under way")
    return _summed_up(report, ends)


def terminations(n: int, seed: int = 0) -> Report:
    """SIGTERM under load n times, with more and with less time to finish than is needed: each stream has an end."""
    report = Report("SIGTERM under load")
    chance, ends = random.Random(seed), Counter[str]()
    for i in range(n):
        with serving_example(0, "--drain-timeout", str((0.05, 30.0)[i % 2])) as server:
            ends += asyncio.run(_end_under_load(server, signal.SIGTERM, chance, 100))
            code = server.popen.wait(TIMEOUT)
            report.check(code == 0, f"it ended with {code}")
    report.lost += [f"a stream {how}" for how in ("cut", "hangs") for _ in range(ends[how])]
    report.check(ends["whole"] > 0, "no stream was under way")
    return _summed_up(report, ends)


def _summed_up(report: Report, ends: Counter[str]) -> Report:
    report.tried = ends.total()
    report.note = ", ".join(f"{count} {how}" for how, count in ends.most_common())
    return report


async def _end_under_load(
    server: ServerProcess, how: signal.Signals, chance: random.Random, most: int
) -> Counter[str]:
    """Signal when a few clients, any number of them, have begun to read; how each one's stream ended."""
    streams = [
        Stream(server.port, max_tokens=chance.randint(1, most), n=chance.randint(1, 2))
        for _ in range(_CLIENTS)
    ]
    running = [asyncio.ensure_future(stream.run()) for stream in streams]
    for stream in chance.sample(streams, chance.randint(1, 8)):
        await stream.begun.wait()
    server.popen.send_signal(how)
    return Counter(await asyncio.gather(*running))
