"""Files and batches of several servers: contents in a folder of all, descriptions in Redis."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from kvasir.model.platform.files import in_words
from kvasir.server.batches.objects import ENDED, StoredBatch, StoredFile, Upload
from kvasir.server.batches.store import RECORD_BYTES, BatchStore, Record
from kvasir.server.batches.threads import in_thread
from kvasir.server.errors import StartupError, UnavailableError

if TYPE_CHECKING:
    from kvasir.server.state.redis_state import RedisState

T = TypeVar("T")

_UPLOADS = b"uploads"  # the account of their leases
_parse = TypeAdapter[Any](StoredFile | StoredBatch | Upload).validate_json


class SharedStore(BatchStore):
    """The files and batches of all servers, as they were at the last `refresh`.

    What changes them goes through `change`, on the event loop. In the folder `shared` of the one
    given, files/ID holds a content, and batches/ID/N the answers to a part of a batch. Methods that
    wait raise UnavailableError while Redis is away. A content has a description or an upload in
    Redis from before it is there until it is gone, by which it is found if its server dies.
    """

    def __init__(self, state: RedisState, folder: Path, **limits: Any) -> None:
        self.state = state
        self.files, self.batches, self.uploads = {}, {}, dict[str, Upload]()
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
            found = await in_thread(None, lambda: [_parse(one) for one in records.values() if one])
            present = {*self.files, *self.batches, *self.uploads}
            for name in present if is_whole else present & records.keys():
                self.files.pop(name, None)
                self.uploads.pop(name, None)
                if not records.get(name):
                    self.batches.pop(name, None)
            for one in found:
                if isinstance(one, StoredBatch):  # tasks keep those that they know
                    vars(self.batches.setdefault(one.id, one)).update(vars(one))
                else:
                    (self.files if isinstance(one, StoredFile) else self.uploads)[one.id] = one
            self.files, self.batches = _in_order(self.files), _in_order(self.batches)
            self._version, self._of_records = version, Counter()
            for record in chain[Any](self.files.values(), self.batches.values()):
                self._of_records[record.owner] += RECORD_BYTES + getattr(record, "bytes", 0)
            for upload in self.uploads.values():
                self._of_records[upload.owner] += upload.bytes
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

    async def hold(self, upload: Upload, least: int, most: int) -> None:
        """See BatchStore. Raises UnavailableError, too."""
        upload.lease = upload.lease or await self.state.enter(_UPLOADS, 2**31) or ""
        await super().hold(upload, least, most)

    def _hold(self, upload: Upload, least: int, most: int) -> int:
        if upload.bytes:
            self._check_held(upload)
        n_bytes = super()._hold(upload, least, most)
        held = upload.model_copy(update={"bytes": n_bytes})
        self._write(self.path(upload.id), held, reserved=False)
        return n_bytes

    def _check_held(self, upload: Upload) -> None:
        """Raise UnavailableError if an upload was swept."""
        if self.uploads.get(upload.id) != upload:
            message = "the server was away for too long during this upload; send the file again"
            raise UnavailableError(message, retry_after=1)

    async def add(self, upload: Upload, written: Callable[[], StoredFile]) -> StoredFile:
        """See BatchStore. Raises UnavailableError, too."""
        file = await in_thread(None, written)

        def work() -> StoredFile:
            self._check_held(upload)
            self.describe(file)
            return file

        return await self.change(work)

    async def drop(self, upload: Upload) -> None:
        """See BatchStore. While Redis is away it is left to `sweep`."""
        if upload.lease:
            await self.state.leave(_UPLOADS, upload.lease)
        with suppress(UnavailableError):
            await self.change(partial(self._drop, upload))

    async def sweep(self) -> None:
        """Remove what dead servers have left of uploads, deleted files and ended batches.

        Raises OSError and UnavailableError.
        """
        uploads = [*self.uploads.values()]  # whose leases are older than those to be seen
        living = await self.state.living(_UPLOADS) if uploads else set()

        def work() -> None:
            for one in uploads:
                if one.lease in living or self.uploads.get(one.id) != one:
                    continue
                if one.lease:
                    self._remove(self.path(one.id), one.bytes, one.owner)
                else:
                    self.path(one.id).unlink(missing_ok=True)
                    self._changes[one.id] = b""

        await self.change(work)
        for folder in await in_thread(None, lambda: [*self._batches.iterdir()]):
            batch = self.batches.get(folder.name)
            if batch is not None and batch.status in ENDED:
                await in_thread(None, shutil.rmtree, folder, ignore_errors=True)

    def save(self, batch: StoredBatch, *, reserved: bool = False) -> None:
        """See BatchStore. A copy is so here once Redis has it: until then nobody may act on it."""
        stored = self.batches.get(batch.id)
        if stored is not None and stored.status not in ENDED:
            self._write(self._batches / f"{batch.id}.json", batch, reserved=reserved)
            self._saved.append((stored, batch))

    def _write(self, _path: Path, record: Any, *, reserved: bool) -> None:  # noqa: ARG002
        self._changes[record.id] = record.model_dump_json().encode()

    def _remove(self, path: Path, _n_bytes: int, owner: str) -> None:
        if path.suffix == ".json":
            self._changes[path.stem] = b""
        else:  # `sweep` removes it if this server cannot
            self._write(path, Upload(id=path.name, owner=owner), reserved=True)
            self._removed.append(path)

    def _reserve(self) -> None:
        """Do nothing: Redis has room for the ends of batches."""

    def part(self, batch: StoredBatch, name: object) -> Path:
        """Return the path of a part's answers; that of all parts has no name."""
        return self._batches / batch.id / str(name)


def _in_order(records: dict[str, Record]) -> dict[str, Record]:
    """Return descriptions in the order of their creation, which is the same on all servers."""
    return dict(sorted(records.items(), key=lambda item: (item[1].created_at, item[0])))
