"""A model of a folder, whose files may change: a new version then takes the place of the old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvasir.model.directory import MANIFEST_FILE, ModelDirectory, load_model_dir
from kvasir.model.platform.files import Stamp, stamp_of
from kvasir.model.platform.machine import peak_memory, resident_memory, restart_peak
from kvasir.server.errors import StartupError
from kvasir.server.requests.async_engine import AnyEngine
from kvasir.server.requests.loading.loader import Need
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.telemetry.start_clock import StartClock

Build = Callable[[ServedModel, StartClock], AnyEngine]
_PEAK = 2  # times its files, of a model that was never loaded: weights as read and as computed with


class FolderModel:
    """A served model that is loaded and unloaded. Raises StartupError for one on a GPU.

    kv_bytes: the memory that its KV cache and prefix cache may take, once they are full. versions:
    served models by name, among which a new version takes the place of the old one.
    """

    def __init__(
        self, served: ServedModel, kv_bytes: int, versions: dict[str, ServedModel]
    ) -> None:
        self.name, self._versions = served.name, versions
        versions[self.name] = served
        self.former = list[ServedModel]()  # versions that requests still use
        self.build: Build | None = None  # until the server has started
        # Frees what belongs to a version of the model, which is about to leave.
        self.on_unload: Callable[[ServedModel], object] = lambda _: None
        self._kv_bytes = kv_bytes
        self._files = _stamps(served.model_dir.path)
        self._seen = self._manifest()
        self._measured: Need | None = None
        _check_device(served.model_dir)

    @property
    def version(self) -> ServedModel:
        """The version that requests get."""
        return self._versions[self.name]

    def has_changed(self) -> bool:
        """Return whether there is a manifest that no load has read."""
        return self._manifest() not in (None, self._seen)

    def _manifest(self) -> Stamp | None:
        return stamp_of(self.version.model_dir.path / MANIFEST_FILE)

    @property
    def n_file_bytes(self) -> int:
        """The size of its files."""
        return sum(size for size, _ in self._files.values())

    def need(self) -> Need:
        """Return the memory that it takes, measured when it was loaded before."""
        n = self.n_file_bytes
        peak, kept = self._measured or Need(_PEAK * n, _PEAK * n)
        cache = self._kv_bytes if self.version.task == "generate" else 0
        return Need(peak + cache, kept + cache)

    async def load(self) -> None:
        """Load the model; read its directory again if files have changed.

        Raises StartupError, ModelDirectoryError, and what building the engine raises.
        """
        try:
            await self._load()
        except Exception:
            self.version.metrics.server.failed(self.name, is_failed=True)
            raise
        self.version.metrics.server.failed(self.name, is_failed=False)
        self.version.metrics.server.loaded(self.name)

    async def unload(self) -> None:
        """Free the model's memory."""
        self.on_unload(self.version)
        await self.version.stop()

    async def retire(self, version: object) -> None:
        """Free the memory of a former version, which nothing uses any more."""
        served = next(each for each in self.former if each is version)
        self.on_unload(served)
        await served.stop()
        self.former.remove(served)
        served.metrics.end()

    async def _load(self) -> None:
        if self.build is None:
            raise StartupError("the server has not started")
        served, path = self.version, self.version.model_dir.path
        is_ready = served.engine.is_running and served.engine.is_healthy
        if not is_ready and (served.engine.failed or served.engine.is_running):
            raise StartupError("its engine has failed or hangs; the server must be restarted")
        self._seen = self._manifest()
        files = await asyncio.to_thread(_stamps, path)
        if is_ready and files == self._files:
            return
        try:
            if files != self._files:
                model_dir = await asyncio.to_thread(load_model_dir, path)
                _check_device(model_dir)
                if is_ready:
                    served = served.renewed(model_dir)
                else:
                    served.use(model_dir)
                self._measured = None
            before = resident_memory()
            restart_peak()
            clock = StartClock(of_process=False)
            await served.start(partial(self.build, served, clock), clock)
        except BaseException:
            if served is not self.version:
                served.metrics.end()
            self.version.metrics.show()
            raise
        self._files = files
        if served is not self.version:
            self.former.append(self.version)
            self._versions[self.name] = served
        kept = max(resident_memory() - before, self.n_file_bytes)
        self._measured = Need(max(peak_memory() - before, kept), kept)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size of each file, and the nanosecond of its last change."""
    facts = {file.name: file.stat() for file in folder.glob("*") if file.is_file()}
    return {name: (fact.st_size, fact.st_mtime_ns) for name, fact in facts.items()}


def _check_device(model_dir: ModelDirectory) -> None:
    if model_dir.manifest.device != "cpu":
        device = model_dir.manifest.device
        raise StartupError(f"{model_dir.path} is for {device}, and stays loaded: name it itself")
