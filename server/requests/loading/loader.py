"""Which models of a folder are in memory: loaded when they are asked for, the least used unloaded.

All methods are for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from time import time
from typing import Any, Literal, NamedTuple, Protocol

from kvasir.server.errors import UnavailableError
from kvasir.server.requests.turns import Turns

logger = logging.getLogger("kvasir")

LoadState = Literal["unloaded", "loading", "ready", "failed"]
_RETRY = 5  # seconds until a model may have been loaded
_FAILED_RETRY = 60  # seconds, before which one that could not be loaded is not tried again


class Need(NamedTuple):
    """The memory of a model in bytes: the most while it is loaded, and what it keeps."""

    peak: int
    kept: int


class Loadable(Protocol):
    """A model that may be in memory."""

    name: str

    @property
    def version(self) -> object:
        """The version that requests get; loading may change it."""

    def has_changed(self) -> bool:
        """Return whether there is a new version to load beside the one in memory."""

    async def retire(self, version: object) -> None:
        """Free the memory of a former version."""

    def need(self) -> Need:
        """Return the memory that it takes, measured if it was loaded before."""

    async def load(self) -> None:
        """Load it. Raises any Exception if that fails."""

    async def unload(self) -> None:
        """Free its memory."""


class _Place:
    """A model, and who uses it."""

    def __init__(self, model: Loadable, keep_alive: float) -> None:
        self.model, self.keep_alive = model, keep_alive
        self.is_loaded = self.is_loading = self.is_leaving = False
        self.failure = ""
        self.n_running = self.n_uses = 0
        self.holders = Counter[object]()  # requests that run, by version
        self.idle = asyncio.Event()  # set while nothing runs
        self.idle.set()
        self.timer: asyncio.TimerHandle | None = None
        self.expires_at: int | None = None


class ModelLoader:
    """The models of a folder. One is loaded or unloaded at a time, in the order of the requests.

    budget: the bytes that all may take. free: returns those that are free now. keep_alive: seconds
    for which an unused model stays loaded; math.inf is for ever. max_waiting: requests that may
    wait for a model.
    """

    def __init__(
        self,
        models: Iterable[Loadable],
        *,
        budget: int,
        free: Callable[[], int],
        keep_alive: float,
        max_waiting: int,
    ) -> None:
        self.budget, self.free = budget, free
        self.keep_alive, self.max_waiting = keep_alive, max_waiting
        # The least recently used first.
        self._places = OrderedDict((one.name, _Place(one, keep_alive)) for one in models)
        self.names = frozenset(self._places)
        self.n_waiting = 0
        self.is_closed = False
        # Frees what is in memory beside the models, and can be loaded again.
        self.on_shortage: Callable[[], Awaitable[object]] | None = None
        self._turns = Turns()
        self._tasks = set[asyncio.Task[None]]()  # else they could be collected

    def figures(self) -> tuple[float, float, float]:
        """Return the bytes that are kept, those that may be, and the requests that wait."""
        return self.n_bytes, self.budget, self.n_waiting

    def need(self, name: str) -> Need:
        """Return the memory that a model takes."""
        return self._places[name].model.need()

    @property
    def n_bytes(self) -> int:
        """The bytes that the loaded models keep."""
        return sum(place.model.need().kept for place in self._loaded)

    @property
    def _loaded(self) -> list[_Place]:
        return [place for place in self._places.values() if place.is_loaded]

    def state(self, name: str) -> LoadState:
        """Return the state of a model."""
        place = self._places[name]
        if place.is_loading or place.is_loaded:
            return "loading" if place.is_loading else "ready"
        return "failed" if place.failure else "unloaded"

    def expires_at(self, name: str) -> int | None:
        """Return when an unused model is unloaded, in seconds since 1970; None for no such time."""
        return self._places[name].expires_at

    @asynccontextmanager
    async def hold(self, name: str, keep_alive: float | None = None) -> AsyncIterator[None]:
        """Keep a model loaded until the block is left, and for `keep_alive`; load it, if need be.

        Raises UnavailableError if too many wait already, for a model that has failed, or that has
        no room, and at shutdown.
        """
        place = self._places[name]
        await self._take(place)
        version = place.model.version
        place.holders[version] += 1
        place.keep_alive = self.keep_alive if keep_alive is None else keep_alive
        try:
            yield
        finally:
            place.n_running -= 1
            place.holders[version] -= 1
            self._retire_unused(place, version)
            self._places.move_to_end(name)
            if not place.n_running:
                place.idle.set()
                self._rest(place)

    async def load(self, name: str) -> None:
        """Load a model, also one that has failed before; raises as `hold`."""
        self._places[name].failure = ""
        async with self.hold(name):
            pass

    async def unload(self, name: str) -> None:
        """Unload a model; if requests use it, once the last of them has ended."""
        place = self._places[name]
        place.keep_alive = 0.0
        await self._unload_unused(place, place.n_uses)

    def close(self) -> None:
        """Load and unload nothing any more; those who wait get an UnavailableError."""
        self.is_closed = True
        for place in self._places.values():
            if place.timer is not None:
                place.timer.cancel()

    async def _take(self, place: _Place) -> None:
        """Count a request as one that uses a model, once it is loaded."""
        if place.is_loaded and not place.is_leaving and not place.model.has_changed():
            self._use(place)
            return
        self._check(place)
        if self.n_waiting >= self.max_waiting:
            message = f"{self.n_waiting} requests already wait for a model; try again later"
            raise UnavailableError(message, retry_after=_RETRY)
        self.n_waiting += 1
        try:
            async with self._turns.take():
                if not place.is_loaded or place.model.has_changed():
                    self._check(place)
                    await self._make_room(place)
                    await self._turns.finish(self._load(place))
                self._check(place)
                self._use(place)
        finally:
            self.n_waiting -= 1

    def _check(self, place: _Place) -> None:
        if self.is_closed:
            raise UnavailableError("the server is shutting down; try again", retry_after=1)
        if place.failure:
            message = f"the model {place.model.name!r} could not be loaded: {place.failure}"
            raise UnavailableError(message, retry_after=_FAILED_RETRY)

    def _use(self, place: _Place) -> None:
        place.n_running += 1
        place.n_uses += 1
        place.idle.clear()
        self._places.move_to_end(place.model.name)
        if place.timer is not None:
            place.timer.cancel()
            place.timer = place.expires_at = None

    async def _make_room(self, place: _Place) -> None:
        """Unload models until another fits: unused ones first, the least recently used first."""
        needed = place.model.need().peak
        if self.on_shortage is not None and self.free() < needed <= self.budget:
            await self.on_shortage()
            self._check(place)
        most = min(self.budget, self.free() + self.n_bytes)
        while needed > min(self.budget - self.n_bytes, self.free()):
            loaded = self._loaded
            if needed > most or not loaded:
                message = (
                    f"the model {place.model.name!r} does not fit: it needs {needed:,} bytes, and "
                    f"{most:,} are there for models (setting models_memory)"
                )
                raise UnavailableError(message, retry_after=_FAILED_RETRY)
            unused = (each for each in loaded if not each.n_running)
            await self._leave(next(unused, loaded[0]))
            self._check(place)

    async def _leave(self, place: _Place) -> None:
        """Unload a model after its last request; new ones wait for their turn meanwhile."""
        place.is_leaving = True
        try:
            await place.idle.wait()
            place.is_loaded = False
            await self._turns.finish(self._unload(place))
        finally:
            place.is_leaving = False

    async def _load(self, place: _Place) -> None:
        place.is_loading, version = True, place.model.version
        try:
            await place.model.load()
        except Exception as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            message = "a model could not be loaded"
            fields = {"model": place.model.name, "cause": cause}
            logger.error(message, extra={"fields": fields})
            if not place.is_loaded:  # else the old version stays
                place.failure = cause
                asyncio.get_running_loop().call_later(_FAILED_RETRY, setattr, place, "failure", "")
        else:
            place.is_loaded = True
            self._retire_unused(place, version)
            if place.timer is None and not place.n_running:
                self._rest(place)  # in case the request has given up
        finally:
            place.is_loading = False

    def _retire_unused(self, place: _Place, version: object) -> None:
        """Let a former version go with its last request."""
        if not place.holders[version]:
            del place.holders[version]
            if version is not place.model.version:
                self._in_background(place.model.retire(version))

    async def _unload(self, place: _Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = place.expires_at = None
        await place.model.unload()
        logger.info("model unloaded", extra={"fields": {"model": place.model.name}})

    def _rest(self, place: _Place) -> None:
        """Let an unused model go after its time."""
        if place.is_loaded and place.keep_alive < math.inf and not self.is_closed:
            loop = asyncio.get_running_loop()
            place.timer = loop.call_later(place.keep_alive, self._expire, place)
            place.expires_at = int(time()) + round(place.keep_alive)

    def _expire(self, place: _Place) -> None:
        self._in_background(self._unload_unused(place, place.n_uses))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload_unused(self, place: _Place, n_uses: int) -> None:
        """Unload a model, unless it was used since or is not loaded."""
        async with self._turns.take():
            if place.is_loaded and not place.n_running and place.n_uses == n_uses:
                await self._leave(place)
