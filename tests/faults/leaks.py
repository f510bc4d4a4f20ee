"""Resources that a server holds without connections."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import psutil

from tests.fake_runner import TIMEOUT
from tests.faults.canary import reset_peak
from tests.faults.report import Report
from tests.live import Live

_GROWTH = 8 * 2**20  # bytes that the process may grow by: allocators keep some
OF_LARGE_BODIES = 32 * 2**20  # the same, after many of megabytes


def held(served: Live) -> dict[str, float]:
    asyncio.run_coroutine_threadsafe(_become_quiet(served), served.loop).result()
    gc.collect()  # others in this process may have left something open
    process = psutil.Process()
    return {
        "tasks": len(asyncio.all_tasks(served.loop)),
        "file descriptors": process.num_fds(),
        "rows, reservations and places": sum(served.service.engine.occupancy())
        + served.service.admission.n_inside,
        "bytes": reset_peak(process.pid),
    }


def check_nothing_leaked(
    report: Report, before: dict[str, float], after: dict[str, float], growth: int = _GROWTH
) -> None:
    grown = after.pop("bytes") - before.pop("bytes")
    report.check(grown < growth, f"memory grew by {grown} bytes")
    for what, count in before.items():
        report.check(after[what] <= count, f"{what}: {count} before, {after[what]} afterwards")
    report.note += f"memory {grown / 2**20:+.1f} MiB"


async def _become_quiet(served: Live) -> None:
    """Let the loop turn until every connection is lost and every sequence has ended."""
    state, engine = served.server.server_state, served.service.engine
    with suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT):
            while state.connections or state.tasks or any(engine.occupancy()):  # noqa: ASYNC110  nothing announces the last
                await asyncio.sleep(0)
