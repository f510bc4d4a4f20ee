"""A heartbeat on the event loop of each server that has a thread of its own, and the memory.

All tokens of all streams pass through that loop, so a late beat is a stall of every stream. The
attackers share its process, and its interpreter's lock: alone, the server stalls less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from server.requests.service import Service

_INTERVAL = 0.005  # seconds between two beats


class Canary:
    """The stalls of the servers' event loops, in seconds, and the most memory, in bytes."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._bytes_before = self._process.memory_info().rss
        self._grown = 0
        self._stalls: list[float] = []

    async def beat(self) -> None:
        """Beat until the event loop ends."""
        with suppress(asyncio.CancelledError):
            while True:
                due = perf_counter() + _INTERVAL
                await asyncio.sleep(_INTERVAL)
                self._stalls.append(perf_counter() - due)
                self._grown = max(self._grown, self._process.memory_info().rss - self._bytes_before)

    def __str__(self) -> str:
        if not self._stalls:
            return f"{'':>8} {'':>8} {'':>6}"  # no such server
        p99, longest = np.quantile(self._stalls, (0.99, 1)) * 1000
        return f"{p99:8.1f} {longest:8.1f} {self._grown / 2**20:6.0f}"


@contextmanager
def canary() -> Iterator[Canary]:
    """Watch each such server that starts within the block."""
    watching, start = Canary(), Service.start

    async def start_and_watch(service: Service, *arguments: Any) -> None:
        await start(service, *arguments)
        if current_thread() is not main_thread():  # which runs the attackers' loop
            service.canary = asyncio.create_task(watching.beat())  # type: ignore[attr-defined]

    with patch.object(Service, "start", start_and_watch):
        yield watching
