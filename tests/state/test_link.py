"""The link to Redis, without one."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, NoReturn

from kvasir.server.state.link import Link


async def test_a_cancelled_request_leaves_no_error_behind() -> None:
    """As that of a connection that Redis closes while the request's client goes."""
    link, told = Link("redis://127.0.0.1:1"), list[Any]()
    started, ended = asyncio.Event(), asyncio.Event()
    link.is_up = True

    async def command() -> NoReturn:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise ConnectionError("closed") from None
        raise AssertionError

    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    waiting = asyncio.create_task(link.reply(command))
    await started.wait()
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    await ended.wait()
    await asyncio.sleep(0)
    del waiting
    gc.collect()
    assert not told
