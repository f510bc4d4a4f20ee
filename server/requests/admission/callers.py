"""The sender of requests: the name of an API key, its limits, and what it uses of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvasir.server.errors import OverloadedError
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.state import State, Taken

T = TypeVar("T")


@dataclass(slots=True)
class Reservation:
    """Tokens that a request has taken; those that it does not use are given back."""

    n_used: int = 0


@dataclass(slots=True, eq=False)
class Caller:
    """All keys of one name. Without keys, everybody, without a name and limits.

    salt: of its prefix cache. concurrency: requests in flight; None is any number.
    tokens_per_minute: of prompts and answers; None is any number. state: counts both, under the
    name `account`. A request reserves its `max_tokens` when it begins, and gives back at its end
    what it has not used; so only the last one can exceed the limit, and the next one waits the
    longer.
    """

    name: str = ""
    salt: bytes = b""
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    state: State = field(default_factory=MemoryState)
    account: bytes = b""

    @asynccontextmanager
    async def request(self, retry_after: Callable[[], int]) -> AsyncIterator[None]:
        """Count a request until the block is left. Raises OverloadedError for one too many."""
        limit = self.concurrency
        if limit is None:
            yield
            return

        async def leave(entering: asyncio.Task[str | None]) -> None:
            if (lease := await entering) is not None:
                await self.state.leave(self.account, lease)

        async with self._held(self.state.enter(self.account, limit), leave) as lease:
            if lease is None:
                raise OverloadedError(
                    f"{limit} requests with this API key are in flight, which is its limit; wait "
                    "for one to end",
                    retry_after=retry_after(),
                    limit="key",
                )
            yield

    @asynccontextmanager
    async def tokens(self, n_tokens: int) -> AsyncIterator[Reservation]:
        """Reserve tokens until the block is left, which sets the number that it has used.

        Raises OverloadedError while the tokens of a minute are used.
        """
        limit, reservation = self.tokens_per_minute, Reservation()
        if limit is None:
            yield reservation
            return

        async def give_back(taking: asyncio.Task[Taken]) -> None:
            taken = await taking
            if taken.n_used < limit:
                await self.state.give_back(self.account, taken, n_tokens - reservation.n_used)

        async with self._held(self.state.take(self.account, limit, n_tokens), give_back) as taken:
            if taken.n_used >= limit:
                raise OverloadedError(
                    f"this API key may use {limit} tokens a minute, and {taken.n_used:.0f} are "
                    "used by prompts and answers, or reserved for what runs; wait, or ask for "
                    "fewer",
                    retry_after=int((taken.n_used - limit) * 60 / limit) + 1,
                    limit="key_tokens",
                )
            yield reservation

    @asynccontextmanager
    async def _held(
        self,
        take: Coroutine[Any, Any, T],
        release: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]],
    ) -> AsyncIterator[T]:
        """Hold what is taken until the block is left, or the task is cancelled at any moment."""
        taking = self.state.run(take)
        try:
            yield await asyncio.shield(taking)
        finally:
            await asyncio.shield(self.state.run(release(taking)))
