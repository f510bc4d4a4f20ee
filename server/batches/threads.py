"""Work in threads, none of which outlives its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(
    executor: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return the result of work in a thread of an executor; None is asyncio's own.

    A cancelled caller waits for its end first: it may then close or remove what the work used.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(executor, partial(work, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    finally:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
