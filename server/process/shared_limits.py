"""Limits on all connections together: their number, bytes, and turns on the event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from kvasir.model.platform.machine import return_freed_memory
from kvasir.server.errors import KvasirError, UnavailableError

logger = logging.getLogger("kvasir")

_RESERVED_FILES = 64  # open files beside connections, and newcomers until they are turned away
_RESERVED_CONNECTIONS = 16  # connections left to probes; with few connections a quarter of them
_READ = 2**14  # bytes that are read at once; the kernel keeps the rest, and slows the client down
_TURN = 0.005  # seconds of parsing, after which the event loop does other work
_BURST = 2**23  # held bytes, after which glibc would keep much of their memory
_BURST_END = 1.0  # seconds in which connections that held it are taken down
_LOG_INTERVAL = 10.0  # seconds between two log lines on too many connections


class Connection(Protocol):
    """The part of a connection that the limits use."""

    transport: asyncio.Transport

    def refuse(self, error: KvasirError) -> None:
        """Answer with an error and close; release what is held."""

    def cut_off(self, reason: str = ...) -> None:
        """End the connection at once."""


def max_connections() -> int:
    """Return how many connections fit into the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(soft - _RESERVED_FILES, soft // 2)


class HeldBytes:
    """Bytes that connections hold, and their sum; the connection that began first is the first.

    Memory of a burst is returned once it has ended.
    """

    def __init__(self) -> None:
        self.total = 0
        self._is_burst = False
        self.held: dict[Connection, int] = {}

    def add(self, connection: Connection, n_bytes: int) -> None:
        """Count bytes that a connection holds."""
        self.held[connection] = self.held.get(connection, 0) + n_bytes
        self.total += n_bytes
        self._is_burst |= self.total > _BURST

    def release(self, connection: Connection) -> None:
        """Forget the bytes of a connection."""
        self.total -= self.held.pop(connection, 0)
        if self._is_burst and self.total < _BURST // 2:
            self._is_burst = False
            loop = asyncio.get_running_loop()
            loop.call_later(_BURST_END, loop.run_in_executor, None, return_freed_memory)


class Turns:
    """Work of all connections in turns on the event loop, between which streams can send.

    A turn starts a probe and another request, since each takes about a millisecond, and parses for
    `_TURN`.
    """

    def __init__(self) -> None:
        self._probes, self._requests = deque[asyncio.Event](), deque[asyncio.Event]()
        self._slices = deque[Callable[[], None]]()
        self._next: asyncio.Handle | None = None

    async def wait(self, *, is_probe: bool) -> None:
        """Return when a request may start."""
        (self._probes if is_probe else self._requests).append(event := asyncio.Event())
        self._schedule()
        await event.wait()

    def parse(self, work: Callable[[], None]) -> None:
        """Parse a slice after those that wait."""
        self._slices.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._next is None and (self._probes or self._requests or self._slices):
            self._next = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._next, end = None, monotonic() + _TURN
        for waiting in (self._probes, self._requests):
            if waiting:
                waiting.popleft().set()
        try:
            while self._slices and monotonic() < end:
                self._slices.popleft()()
        finally:
            self._schedule()


class SharedLimits:
    """Limits on the number of connections, on unfinished requests, and on answers not yet read.

    A newcomer beyond `most` ends the one that has waited longest. A few connections are left to
    newcomers, for probes: beyond them a complete request is refused. `most_bytes` bounds unfinished
    requests, `most_unread` answers that wait for clients to read; beyond them the client that began
    first is refused, or cut off.
    """

    def __init__(self, most: int, most_bytes: int, most_unread: int) -> None:
        self._most, self._most_bytes, self._most_unread = most, most_bytes, most_unread
        self._most_busy = most - min(_RESERVED_CONNECTIONS, most // 4)
        # Those without a complete request, except probes; the one that has waited longest first.
        self._waiting: dict[Connection, None] = {}
        self._busy = set[Connection]()
        self.unfinished, self.unread = HeldBytes(), HeldBytes()
        self.turns = Turns()
        self.read_buffer = memoryview(bytearray(_READ))
        self._n_aborted = 0
        self._logged_at = -_LOG_INTERVAL

    def add(self, newcomer: Connection, n_connections: int) -> None:
        """Take in a connection; `n_connections` counts it."""
        self.wait(newcomer)
        if n_connections <= self._most:
            return
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.transport.abort()
        self._n_aborted += 1
        if monotonic() - self._logged_at >= _LOG_INTERVAL:
            fields = {"most": self._most, "cut_off": self._n_aborted}
            message = "more connections than open files allow: cut off those that waited longest"
            logger.warning(message, extra={"fields": fields})
            self._logged_at, self._n_aborted = monotonic(), 0

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for a request, or for the rest of one."""
        self._busy.discard(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def begin(self, connection: Connection) -> bool:
        """Note that a connection has a complete request; return whether there is room for it."""
        if connection not in self._busy and len(self._busy) >= self._most_busy:
            return False
        self._waiting.pop(connection, None)
        self._busy.add(connection)
        return True

    def hold(self, connection: Connection, n_bytes: int) -> None:
        """Count bytes of an unfinished request; beyond the limit refuse the one begun first."""
        self.unfinished.add(connection, n_bytes)
        while self.unfinished.total > self._most_bytes:
            message = f"unfinished requests exceed {self._most_bytes} bytes; send this one again"
            next(iter(self.unfinished.held)).refuse(UnavailableError(message, retry_after=1))

    def stall(self, connection: Connection, n_bytes: int) -> None:
        """Count bytes that a client leaves unread; beyond the limit cut off the longest stalled.

        A client may be alone with more than the limit.
        """
        self.unread.release(connection)
        self.unread.add(connection, n_bytes)
        while self.unread.total > self._most_unread and len(self.unread.held) > 1:
            slowest = next(iter(self.unread.held))
            self.unread.release(slowest)
            slowest.cut_off("cut off a client that does not read: too much waits to be read")

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self.unfinished.release(connection)
        self.unread.release(connection)
        self._waiting.pop(connection, None)
        self._busy.discard(connection)
