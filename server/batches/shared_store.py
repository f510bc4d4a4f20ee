"""Files and batches of several servers: contents in a folder of all, descriptions in Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvasir.model.platform.files import in_words
from kvasir.server.batches.objects import ENDED, StoredBatch, StoredFile
from kvasir.server.batches.store import RECORD_BYTES, BatchStore, Record
from kvasir.server.batches.threads import in_thread
from kvasir.server.errors import StartupError

if TYPE_CHECKING:
    from kvasir.server.state.redis_state import RedisState

T = TypeVar("T")


class SharedStore(BatchStore):
    """The files and batches of all servers, as they were at the last `refresh`.

    What changes them goes through `change`, on the event loop. In the folder `shared` of the one
    given, files/ID holds a content, and batches/ID/N the answers to a part of a batch. Methods that
    wait raise UnavailableError while Redis is away.
    """

    def __init__(self, state: RedisState, folder: Path, **limits: Any) -> None:
        self.state = state
        self.files, self.batches = {}, {}
        self._version = self._n_found = -1
        self._of_records = Counter[str]()  # bytes, by owner
        # What the present work changes: in Redis, of batches here, and on the disk.
        self._changes, self._saved = dict[str, bytes](), list[tuple[StoredBatch, StoredBatch]]()
        self._removed = list[Path]()
        self._changing = asyncio.Lock()
        super().__init__(folder / "shared", **limits)

    def _open(self, folder: Path) -> None:
        try:
            for part in (self._files, self._batches):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"batch_dir {folder.parent}: {in_words(error)}") from None

    def close(self) -> None:
        """Do nothing: the folder is not this server's alone."""

    async def refresh(self) -> None:
        """See what other servers have changed."""
        async with self._changing:
            await self._pull()

    async def _pull(self) -> None:
        if self._n_found != self.state.n_found:
            self._n_found, self._version = self.state.n_found, -1
        version, is_whole, records = await self.state.pull(self._version)
        if version != self._version:
            found = await in_thread(None, _parse, records)
            present = {*self.files, *self.batches}
            for name in present - records.keys() if is_whole else present & records.keys():
                if not records.get(name):
                    (self.files if name in self.files else self.batches).pop(name)
            for one in found:
                if isinstance(one, StoredFile):
                    self.files[one.id] = one
                else:  # tasks keep those that they know
                    vars(self.batches.setdefault(one.id, one)).update(vars(one))
            self.files, self.batches = _in_order(self.files), _in_order(self.batches)
            self._version, self._of_records = version, Counter()
            for record in chain[Any](self.files.values(), self.batches.values()):
                self._of_records[record.owner] += RECORD_BYTES + getattr(record, "bytes", 0)
        used = self._of_records.copy()
        running = self.unfinished
        progress = await self.state.progress([batch.id for batch in running]) if running else []
        for batch, done in zip(running, progress, strict=True):
            used[batch.owner] += done["bytes"]
            counts = batch.request_counts
            counts.completed, counts.failed = done["completed"], done["failed"]
        self._used = used

    async def change(self, work: Callable[[], T]) -> T:
        """Return the result of work, which is done again if another server was faster."""
        async with self._changing:
            while True:
                await self._pull()
                known = dict(self.files), dict(self.batches)
                self._changes, self._saved, self._removed = {}, [], []
                try:
                    result = work()
                except BaseException:
                    self.files, self.batches = known
                    raise
                version, self._version = self._version, -1  # until the outcome is known
                is_done = not self._changes or await self.state.push(version, self._changes)
                self._version = version
                if is_done:
                    break
                self.files, self.batches = known
            for stored, batch in self._saved:
                vars(stored).update(vars(batch))
        for path in self._removed:
            path.unlink(missing_ok=True)
        return result

    async def add(self, written: Callable[[], StoredFile]) -> StoredFile:
        """See BatchStore."""
        file = await in_thread(None, written)
        await self.change(lambda: self.describe(file))
        return file

    def describe(self, file: StoredFile, *, reserved: bool = False) -> None:
        """See BatchStore."""
        self.take(file.bytes, file.owner, reserved=reserved)
        super().describe(file, reserved=reserved)

    def save(self, batch: StoredBatch, *, reserved: bool = False) -> None:
        """See BatchStore. A copy is so here once Redis has it: until then nobody may act on it."""
        stored = self.batches.get(batch.id)
        if stored is not None and stored.status not in ENDED:
            self._write(self._batches / f"{batch.id}.json", batch, reserved=reserved)
            self._saved.append((stored, batch))

    def _write(self, _path: Path, record: StoredFile | StoredBatch, *, reserved: bool) -> None:  # noqa: ARG002
        self._changes[record.id] = record.model_dump_json().encode()

    def _remove(self, path: Path, _n_bytes: int, _owner: str) -> None:
        if path.suffix == ".json":
            self._changes[path.stem] = b""
        else:
            self._removed.append(path)

    def _reserve(self) -> None:
        """Do nothing: Redis has room for the ends of batches."""

    def part(self, batch: StoredBatch, name: object) -> Path:
        """Return the path of a part's answers; that of all parts has no name."""
        return self._batches / batch.id / str(name)


def _parse(records: Mapping[str, bytes]) -> list[StoredFile | StoredBatch]:
    """Return the descriptions of what is there."""
    return [
        (StoredFile if name.startswith("file") else StoredBatch).model_validate_json(record)
        for name, record in records.items()
        if record
    ]


def _in_order(records: dict[str, Record]) -> dict[str, Record]:
    """Return descriptions in the order of their creation, which is the same on all servers."""
    return dict(sorted(records.items(), key=lambda item: (item[1].created_at, item[0])))
