"""Files and batches in a folder that one process owns.

files/ID holds a content and files/ID.json describes it; without that there is no such file.
batches/ID.json is a batch. Descriptions are replaced at once. Answers are appended to files without
a description yet, a line at a time; a line cut off by a crash is removed when the batch goes on.
The file lock also holds room, for the descriptions that end batches on a full disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvasir.model.platform.files import in_words, sync
from kvasir.server.batches.objects import ENDED, StoredBatch, StoredFile, Upload
from kvasir.server.batches.threads import in_thread
from kvasir.server.errors import ConflictError, NotFoundError, RequestTooLargeError, StartupError

MAX_BATCHES = 1000  # of each key; the oldest that has ended is forgotten for a new one
RECORD_BYTES = 4096  # counted for each description
WINDOW = 24 * 3600  # seconds in which a batch is answered
_RESERVE_BYTES = 2**18  # room of the disk for the ends of batches
_GIVEN_BYTES = 2**14  # of it at once
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
Record = TypeVar("Record", StoredFile, StoredBatch)
T = TypeVar("T")


class BatchStore:
    """The files and batches of all API keys, by id, in the order of their creation.

    max_bytes: of all files. is_shared: a key may use as many bytes as it leaves to others. What is
    `reserved` ends a batch: it may exceed the limit, and use the last room of the disk. Raises
    StartupError for a folder that another server uses, or that cannot be read.
    """

    def __init__(self, folder: Path, *, max_bytes: int, is_shared: bool = False) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        self._max_bytes, self._is_shared = max_bytes, is_shared
        self._writing, self._counting = threading.RLock(), threading.Lock()
        self._used = Counter[str]()  # bytes, by owner
        self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            for part in (self._files, self._batches):
                part.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = _read(self._files, StoredFile)
            self.batches = _read(self._batches, StoredBatch)
            owners = {file.id: file.owner for file in self.files.values()}
            for batch in self.unfinished:
                owners |= dict.fromkeys((batch.answers, batch.failures), batch.owner)
            for path in (*self._files.iterdir(), *self._batches.glob("*.part")):
                if path.name.removesuffix(".json") not in owners:
                    path.unlink()
                elif path.suffix != ".json":
                    self._used[owners[path.name]] += path.stat().st_size
        except BlockingIOError:
            self._lock.close()
            message = "is used by another server; give each a batch_dir of its own"
            raise StartupError(f"batch_dir {folder} {message}") from None
        except (OSError, ValidationError) as error:
            raise StartupError(f"batch_dir {folder}: {in_words(error)}") from None
        for record in chain[StoredFile | StoredBatch](self.files.values(), self.batches.values()):
            self._used[record.owner] += RECORD_BYTES
        with suppress(OSError):  # a full disk: files can still be deleted
            self._reserve()

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    async def refresh(self) -> None:
        """See what others have changed: here nobody."""

    async def change(self, work: Callable[[], T]) -> T:
        """Return the result of work that changes files or batches."""
        return work()

    async def hold(self, upload: Upload, least: int, most: int) -> None:
        """Hold more bytes for an upload, as far as they are left. Raises RequestTooLargeError."""
        upload.bytes = await self.change(lambda: self._hold(upload, least, most))

    def _hold(self, upload: Upload, least: int, most: int) -> int:
        n_bytes = max(least, min(most, self._left(upload.owner)))
        self.take(n_bytes, upload.owner)
        return upload.bytes + n_bytes

    async def add(self, upload: Upload, written: Callable[[], StoredFile]) -> StoredFile:
        """Return a file, once it is written; its description must be held, too. Raises OSError."""

        def work() -> StoredFile:
            self.describe(file := written())
            self.take(file.bytes - upload.bytes, file.owner)
            upload.bytes = 0  # they are the file's, which others may delete from now on
            return file

        return await in_thread(None, work)

    async def drop(self, upload: Upload) -> None:
        """Remove a content, unless it has become a file."""
        await in_thread(None, self._drop, upload)

    def _drop(self, upload: Upload) -> None:
        if upload.bytes and upload.id not in self.files:
            self._remove(self.path(upload.id), upload.bytes, upload.owner)

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return a file. Raises NotFoundError for one that is unknown or another key's."""
        file = self.files.get(file_id)
        if file is None or file.owner != owner:
            raise NotFoundError(f"there is no file {file_id!r}")
        return file

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return a batch. Raises NotFoundError for one that is unknown or another key's."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise NotFoundError(f"there is no batch {batch_id!r}")
        return batch

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file_id

    def describe(self, file: StoredFile, *, reserved: bool = False) -> None:
        """Make a written content a file. Raises OSError."""
        path, is_new = self._files / f"{file.id}.json", file.id not in self.files
        if is_new:
            self.take(RECORD_BYTES, file.owner, reserved=True)
        try:
            self._write(path, file, reserved=reserved)
        except OSError:
            if is_new:
                self._remove(path, RECORD_BYTES, file.owner)
            raise
        self.files[file.id] = file

    def delete(self, file: StoredFile) -> None:
        """Remove a file. Raises ConflictError for one that a batch still needs."""
        for batch in self.unfinished:
            if file.id in (batch.input_file_id, batch.answers, batch.failures):
                raise ConflictError(f"the batch {batch.id!r} needs this file; cancel it first")
        self._remove(self._files / f"{file.id}.json", RECORD_BYTES, file.owner)
        del self.files[file.id]
        self.discard(file.id, file.owner)

    def discard(self, file_id: str, owner: str) -> None:
        """Remove a content that no description names."""
        with suppress(FileNotFoundError):
            self._remove(self.path(file_id), self.path(file_id).stat().st_size, owner)

    def _remove(self, path: Path, n_bytes: int, owner: str) -> None:
        path.unlink(missing_ok=True)
        self.take(-n_bytes, owner)

    @property
    def n_bytes(self) -> int:
        """The size of all files, with what is counted for descriptions and uploads."""
        return self._used.total()

    def take(self, n_bytes: int, owner: str, *, reserved: bool = False) -> None:
        """Count bytes that are about to be written, or, if less than 0, that are there no more.

        Raises RequestTooLargeError for too many.
        """
        with self._counting:
            left = max(0, self._left(owner))
            if not reserved and n_bytes > left:
                limit = f"the {left} left for you (setting batch_dir_bytes)"
                raise RequestTooLargeError(f"{n_bytes} bytes are more than {limit}; delete files")
            self._used[owner] += n_bytes

    def _left(self, owner: str) -> int:
        """Return the bytes that a key may still take."""
        free = self._max_bytes - self._used.total()
        return (free - self._used[owner]) // 2 if self._is_shared else free

    def has_room(self, n_bytes: int, owner: str) -> bool:
        """Return whether an answer of a key would fit, beside the reserve for ends of batches."""
        free = shutil.disk_usage(self._files).free - _RESERVE_BYTES
        if n_bytes + RECORD_BYTES > min(free, self._left(owner)):
            return False
        self._reserve()
        return True

    def _reserve(self) -> None:
        """Fill the reserve up again. Raises OSError on a full disk, not on one that has none."""
        with self._writing:
            try:
                os.posix_fallocate(self._lock.fileno(), 0, _RESERVE_BYTES)
            except OSError as error:
                if error.errno in _DISK_IS_FULL:
                    raise

    def create(
        self, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None, now: float
    ) -> StoredBatch:
        """Return a new batch, to be saved or forgotten. Raises ConflictError for one too many."""
        if sum(batch.owner == file.owner for batch in self.unfinished) >= MAX_BATCHES:
            raise ConflictError(f"{MAX_BATCHES} batches have not ended; wait for one to end")
        self.take(RECORD_BYTES, file.owner)
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=file.id,
            created_at=int(now),
            expires_at=int(now) + WINDOW,
            metadata=None if metadata is None else dict(metadata),
            owner=file.owner,
            answers=f"file-{secrets.token_hex(12)}",
            failures=f"file-{secrets.token_hex(12)}",
        )
        self.batches[batch.id] = batch
        return batch

    def forget(self, batch: StoredBatch) -> None:
        """Remove a batch."""
        del self.batches[batch.id]
        with suppress(OSError):  # the next start finds it again
            self._remove(self._batches / f"{batch.id}.json", RECORD_BYTES, batch.owner)

    def forget_ended(self, owner: str) -> None:
        """Remove the oldest ended batches of a key that has more than it may."""
        mine = [batch for batch in self.batches.values() if batch.owner == owner]
        ended = [batch for batch in mine if batch.status in ENDED]
        for batch in ended[: max(0, len(mine) - MAX_BATCHES)]:
            self.forget(batch)

    def save(self, batch: StoredBatch, *, reserved: bool = False) -> None:
        """Write a batch, or a copy that differs; then it is so here. One that has ended stays.

        Raises OSError, unless `reserved` also if there is no room for its end.
        """
        with self._writing:
            if not reserved:
                self._reserve()
            stored = self.batches.get(batch.id)
            if stored is not None and stored.status not in ENDED:
                self._write(self._batches / f"{batch.id}.json", batch, reserved=reserved)
                vars(stored).update(vars(batch))

    @property
    def unfinished(self) -> list[StoredBatch]:
        """The batches that have not ended."""
        return [batch for batch in self.batches.values() if batch.status not in ENDED]

    def _write(self, path: Path, record: StoredFile | StoredBatch, *, reserved: bool) -> None:
        content = record.model_dump_json().encode()
        with self._writing:
            while True:
                try:
                    return _replace(path, content)
                except OSError as error:
                    left = os.fstat(self._lock.fileno()).st_size
                    if not reserved or not left or error.errno not in _DISK_IS_FULL:
                        raise
                    os.ftruncate(self._lock.fileno(), max(0, left - _GIVEN_BYTES))


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(content)
        sync(part)
        part.rename(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _read(folder: Path, kind: type[Record]) -> dict[str, Record]:
    """Return the descriptions in a folder by id. Raises OSError and ValidationError."""
    records = [kind.model_validate_json(path.read_bytes()) for path in folder.glob("*.json")]
    records.sort(key=lambda record: (record.created_at, record.id))
    return {record.id: record for record in records}
