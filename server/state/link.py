"""The link to Redis: whether it replies, and how long anybody waits to find out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvasir.server.errors import StartupError, UnavailableError

T = TypeVar("T")

logger = logging.getLogger("kvasir")

# A reply has so many slices of time; one in which the event loop was busy does not count.
_SLICES = 5
_SLICE = 0.01  # seconds
_BYTES_PER_SLICE = 200_000  # that a value has in addition
_RETRY_SECONDS = 0.25
_CONNECTIONS = 8


def away() -> UnavailableError:
    """Return the error for what only the shared state could tell."""
    message = "the state that replicas share cannot be reached; try again in a moment"
    return UnavailableError(message, retry_after=1)


def _take_error(task: asyncio.Future[Any]) -> None:
    """Take note of a command's error, for which nobody waits if its request was cancelled."""
    if not task.cancelled():
        task.exception()


class Link:
    """Redis at a URL: once a reply fails to come, nobody waits until `keep` has had one.

    Raises StartupError for a URL that cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.is_up = False
        self.found = asyncio.Event()  # and told what it has missed
        self._lost = asyncio.Event()
        self._is_told = False  # that it is away
        self._n_replies = 0
        try:
            # By default a full pool is an error, and a refused connection is tried for seconds. The
            # old protocol, without the client's name, connects without a word.
            pool: Any = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS + 1,  # one listens
                timeout=None,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
            )
            pool.make_connection()
        except (ValueError, TypeError):  # which may quote a password
            forms = "redis://HOST:PORT/NUMBER, or the same with rediss:// or unix://PATH"
            raise StartupError(f"setting state_url: it must be {forms}") from None
        self.redis: Any = Redis.from_pool(pool)  # whose types allow for texts in place of bytes

    async def reply(self, command: Callable[[], Awaitable[T]], n_bytes: int = 0) -> T:
        """Return the reply to a command, to or from which `n_bytes` are sent.

        Raises UnavailableError at once while Redis is away, and if it turns out to be.
        """
        if not self.is_up:
            raise away()
        return await self._reply(command, n_bytes // _BYTES_PER_SLICE)

    async def _reply(self, command: Callable[[], Awaitable[T]], n_more: int = 0) -> T:
        task, clock = asyncio.ensure_future(command()), asyncio.get_running_loop().time
        task.add_done_callback(_take_error)
        n_left, n_replies = _SLICES + n_more, self._n_replies
        try:
            while n_left:
                begun = clock()
                await asyncio.wait((task,), timeout=_SLICE)
                if task.done():
                    self._n_replies += 1
                    return task.result()
                if n_replies != self._n_replies:  # others have replies, so it waits in a queue
                    n_left, n_replies = _SLICES + n_more, self._n_replies
                n_left -= clock() - begun < 2 * _SLICE
            self.lose("no reply")
        except Exception as error:  # whatever the client raises, no request fails by it
            self.lose(str(error) or type(error).__name__)
        finally:
            task.cancel()
        raise away()

    async def _connect(self) -> None:
        """Open all connections, so that no request waits for one."""
        await asyncio.gather(*(self.redis.ping() for _ in range(_CONNECTIONS)))

    def lose(self, reason: str) -> None:
        """Note that Redis is away."""
        if not self._is_told:
            logger.error("the shared state is away", extra={"fields": {"reason": reason}})
        self.is_up, self._is_told = False, True
        self.found.clear()
        self._lost.set()

    async def keep(
        self,
        restore: Callable[[], Awaitable[None]],
        renew: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        """Wait for Redis, `restore` what it has missed, `renew` every few seconds, and again."""
        while True:
            with suppress(UnavailableError):
                await self._reply(self._connect)
                self._lost.clear()
                self.is_up = True
                await restore()
                logger.info("the shared state is there")
                self._is_told = False
                self.found.set()
                while self.is_up:
                    await renew()
                    with suppress(TimeoutError):  # `wait_for` could lose a cancellation
                        async with asyncio.timeout(seconds):
                            await self._lost.wait()
            await asyncio.sleep(_RETRY_SECONDS)
