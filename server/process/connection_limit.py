"""How many connections there may be: fewer than the files that the process may open, or nobody could come in at all."""

from __future__ import annotations

import logging
import resource
from time import monotonic
from typing import Protocol

logger = logging.getLogger("kvasir")

_RESERVE = 64  # files that the process has open beside connections, and newcomers that have to be turned away
_SILENCE = 10.0  # seconds between two lines of the log


class Connection(Protocol):
    def drop(self) -> None:
        """End it at once."""


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(soft - _RESERVE, soft // 2)


class ConnectionLimit:
    """Where there would be more than `most`, the one that has asked for nothing for longest makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._n_dropped = 0
        self._told = -_SILENCE
        self._idle: dict[
            Connection, None
        ] = {}  # those who ask for nothing, the first one for longest

    def idles(self, connection: Connection) -> None:
        self._idle[connection] = None

    def asks(self, connection: Connection) -> None:
        """It does, or it has ended."""
        self._idle.pop(connection, None)

    def let_in(self, newcomer: Connection, n_connections: int) -> None:
        """`n_connections`: with the newcomer."""
        self.idles(newcomer)
        if n_connections > self._most:
            first = next(iter(self._idle))
            self.asks(first)
            first.drop()
            self._n_dropped += 1
            self._tell()

    def _tell(self) -> None:
        if monotonic() - self._told >= _SILENCE:
            fields = {"most": self._most, "cut_off": self._n_dropped}
            logger.warning(
                "more connections than open files allow: cut off idle or new ones",
                extra={"fields": fields},
            )
            self._told, self._n_dropped = monotonic(), 0
