"""The adapters of a server: their folders by name, and those in memory, within a budget.

What only reads (`names`, `find`, `inside`) is for any thread, the rest for the event loop's. Files
are read in another, one adapter at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from kvasir.model.adapters.config import ADAPTER_FILE, AdapterError
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters
from kvasir.server.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from kvasir.server.requests.turns import Turns

logger = logging.getLogger("kvasir")

_RETRY = 5  # seconds until requests with other adapters may have ended


class AdapterBank:
    """Known adapters. An unused one leaves memory when another needs its room, the oldest first.

    folders: by name. root: holds further ones, each in a folder of its name, which are found when
    they are asked for. most_bytes: of matrices; one that is read takes three times its size beside
    them.
    """

    def __init__(self, folders: Mapping[str, Path], root: Path | None, most_bytes: int) -> None:
        self.folders = dict(folders)
        self.root = None if root is None else root.resolve()
        self.most_bytes = most_bytes
        self.n_added = 0  # while the server ran: their folders may have changed
        self.models = dict[str, str]()  # of those, by name
        self._hidden = set[str]()  # of the root's: unloaded ones
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()  # the least recently used first
        self._n_holders = Counter[Adapter]()  # requests
        self._turns = Turns()

    @property
    def loaded(self) -> dict[str, Adapter]:
        """Those in memory that requests may name."""
        return dict(self._loaded)

    @property
    def n_bytes(self) -> int:
        """The size of all in memory, with those that are unloaded and still used."""
        held = {*list(self._loaded.values()), *list(self._n_holders)}
        return sum(adapter.n_bytes for adapter in held)

    def figures(self) -> tuple[float, float, float]:
        """Return the number in memory, their bytes, and the most bytes."""
        return len(self._loaded), self.n_bytes, self.most_bytes

    def names(self) -> list[str]:
        """Return the names of all adapters."""
        names = set(self.folders)
        if self.root is not None and self.root.is_dir():
            names |= {path.name for path in self.root.iterdir() if self.find(path.name)}
        return sorted(names)

    def find(self, name: str) -> Path | None:
        """Return an adapter's folder. A link in the root that leads out of it is none."""
        if (named := self.folders.get(name)) is not None:  # another thread may unload it
            return named
        if self.root is None or name in self._hidden or Path(name).name != name:
            return None
        folder = self.inside(name)
        return folder if folder is not None and (folder / ADAPTER_FILE).is_file() else None

    def inside(self, path: str) -> Path | None:
        """Return the path of a folder below the root, links followed.

        None for another place, and for a folder with a link that leads to one.
        """
        if self.root is None or "\0" in path:
            return None
        try:
            found = (self.root / path).resolve()
            held = [each.resolve() for each in found.iterdir()] if found.is_dir() else []
        except (OSError, RuntimeError):  # a name too long, a loop of links
            return None
        is_inside = all(self.root in each.parents for each in (found, *held))
        return found if is_inside else None

    async def add(self, name: str, folder: Path, graph: GraphAdapters, model: str) -> None:
        """Load an adapter under a new name, also if the request gives up meanwhile.

        graph: of its model. Raises InvalidRequestError if it does not fit.
        """
        async with self._turns.take():
            if name in self._loaded:
                message = f"lora_name: {name!r} is served already; unload it first"
                raise InvalidRequestError(message, param="lora_name")
            await self._turns.finish(self._add(name, folder, graph, model))

    async def _add(self, name: str, folder: Path, graph: GraphAdapters, model: str) -> None:
        try:
            self._keep(name, await self._read(name, folder, graph))
        except AdapterError as error:
            raise InvalidRequestError(str(error), param="lora_path") from None
        self.folders[name], self.models[name] = folder, model
        self.n_added += 1
        self._hidden.discard(name)

    def remove(self, name: str) -> None:
        """Forget an adapter. Its memory is free once the requests that use it have ended."""
        self.folders.pop(name, None)
        self.models.pop(name, None)
        self._hidden.add(name)
        self._loaded.pop(name, None)

    def clear(self, graph: GraphAdapters | None) -> None:
        """Free what no request uses of a model's adapters, since it is unloaded."""
        for name, adapter in self.loaded.items():
            if adapter.graph is graph:
                del self._loaded[name]

    @asynccontextmanager
    async def hold(self, name: str, graph: GraphAdapters) -> AsyncIterator[Adapter]:
        """Keep an adapter in memory until the block is left; load it before, if need be.

        graph: of the version of its model that the request has. Raises ModelNotFoundError if the
        adapter is gone, and UnavailableError for one that cannot be loaded or has no room.
        """
        if (adapter := self._fit(name, graph)) is None:
            async with self._turns.take():
                if (adapter := self._fit(name, graph)) is None:
                    adapter = await self._turns.finish(self._load(name, graph))
        self._n_holders[adapter] += 1
        if name in self._loaded:
            self._loaded.move_to_end(name)
        try:
            yield adapter
        finally:
            self._n_holders[adapter] -= 1
            if not self._n_holders[adapter]:
                del self._n_holders[adapter]

    def _fit(self, name: str, graph: GraphAdapters) -> Adapter | None:
        """Return an adapter in memory, unless it was loaded for another version of its model."""
        adapter = self._loaded.get(name)
        return adapter if adapter is not None and adapter.graph is graph else None

    async def _load(self, name: str, graph: GraphAdapters) -> Adapter:
        folder = self.find(name)
        try:
            adapter = None if folder is None else await self._read(name, folder, graph)
        except AdapterError as error:
            logger.error("%s", error)
            message = f"the adapter {name!r} could not be loaded; the server's log says why"
            raise UnavailableError(message, retry_after=60) from None
        if adapter is None or self.find(name) != folder:
            raise ModelNotFoundError(f"the adapter {name!r} has been unloaded", param="model")
        self._keep(name, adapter)
        return adapter

    async def _read(self, name: str, folder: Path, graph: GraphAdapters) -> Adapter:
        adapter = await asyncio.to_thread(graph.load, folder, name, self.most_bytes)
        if adapter.n_bytes > self.most_bytes:
            raise AdapterError(
                f"adapter {name!r}: its size is {adapter.n_bytes:,} bytes; expected at most "
                f"{self.most_bytes:,} (setting adapter_memory)"
            )
        fields = {"adapter": name, "bytes": adapter.n_bytes, "trained_on": adapter.base}
        logger.info("adapter loaded", extra={"fields": fields})
        return adapter

    def _keep(self, name: str, adapter: Adapter) -> None:
        """Add an adapter in the place of others that nobody uses. Raises UnavailableError."""
        self._loaded.pop(name, None)  # of another version
        while self.n_bytes + adapter.n_bytes > self.most_bytes:
            idle = (each for each, held in self._loaded.items() if not self._n_holders[held])
            if (oldest := next(idle, None)) is None:
                raise UnavailableError(
                    "requests with other adapters use all of adapter_memory; try later",
                    retry_after=_RETRY,
                )
            del self._loaded[oldest]
        self._loaded[name] = adapter
