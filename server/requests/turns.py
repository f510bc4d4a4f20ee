"""Loads and unloads in turn, each to its end even if the request that waits for it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """One piece of work at a time, in the order of the requests. For the event loop's thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait until no other work runs; also not that of a request that has given up."""
        async with self._turn:
            if self._work is not None:
                await asyncio.wait([self._work])
            yield

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work in a turn, to its end even if the caller is cancelled."""
        self._work = task = asyncio.create_task(work)
        return await asyncio.shield(task)
