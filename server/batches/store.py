"""Files and batches in a folder that one process owns.

files/ID holds a content and files/ID.json describes it; without that there is no such file.
batches/ID.json is a batch. Descriptions are replaced at once. Answers are appended to files without
a description yet, a line at a time; a line cut off by a crash is removed when the batch goes on.
"""

from __future__ import annotations

import fcntl
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import TypeVar

from pydantic import ValidationError

from model.files import in_words, sync
from server.batches.objects import ENDED, StoredBatch, StoredFile
from server.errors import (
    ConflictError,
    NotFoundError,
    RequestTooLargeError,
    StartupError,
)

RECORD_BYTES = 4096  # counted for each description
WINDOW = 24 * 3600  # seconds in which a batch is answered
Record = TypeVar("Record", StoredFile, StoredBatch)


class BatchStore:
    """The files and batches of all API keys, by id, in the order of their creation.

    max_bytes: of all files. max_batches: of each key; the oldest that has ended is then forgotten.
    Raises StartupError for a folder that another server uses, or that cannot be read.
    """

    def __init__(self, folder: Path, *, max_bytes: int, max_batches: int) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        self._max_bytes, self._max_batches = max_bytes, max_batches
        self._writing = threading.Lock()
        try:
            for part in (self._files, self._batches):
                part.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = _read(self._files, StoredFile)
            self.batches = _read(self._batches, StoredBatch)
            known = set(self.files)
            for batch in self.batches.values():
                known |= set() if batch.status in ENDED else {batch.answers, batch.failures}
            for path in self._files.iterdir():
                if path.name.removesuffix(".json") not in known:
                    path.unlink()
            contents = (path for path in self._files.iterdir() if path.suffix != ".json")
            self.n_bytes = sum(path.stat().st_size for path in contents)
        except BlockingIOError:
            self._lock.close()
            message = "is used by another server; give each a batch_dir of its own"
            raise StartupError(f"batch_dir {folder} {message}") from None
        except (OSError, ValidationError) as error:
            raise StartupError(f"batch_dir {folder}: {in_words(error)}") from None
        self.n_bytes += RECORD_BYTES * (len(self.files) + len(self.batches))

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return a file. Raises NotFoundError for one that is unknown or another key's."""
        found = self.files.get(file_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"there is no file {file_id!r}")
        return found

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return a batch. Raises NotFoundError for one that is unknown or another key's."""
        found = self.batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFoundError(f"there is no batch {batch_id!r}")
        return found

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file_id

    def begin_file(self) -> Upload:
        """Return a new file, to be written."""
        return Upload(self, f"file-{secrets.token_hex(12)}")

    def describe(self, file: StoredFile) -> None:
        """Make a written content a file."""
        self._write(self._files / f"{file.id}.json", file)
        self.files[file.id] = file

    def delete(self, file: StoredFile) -> None:
        """Remove a file. Raises ConflictError for one that a batch still reads."""
        for batch in self.unfinished:
            if batch.input_file_id == file.id:
                raise ConflictError(f"the batch {batch.id!r} reads this file; cancel it first")
        if self.files.pop(file.id, None) is not None:
            self._files.joinpath(f"{file.id}.json").unlink()
            self.discard(file.id)
            self.n_bytes -= RECORD_BYTES

    def discard(self, file_id: str) -> None:
        """Remove a content that no description names."""
        with suppress(FileNotFoundError):
            size = self.path(file_id).stat().st_size
            self.path(file_id).unlink()
            self.n_bytes -= size

    def take(self, n_bytes: int) -> None:
        """Count bytes that are about to be written. Raises RequestTooLargeError for too many."""
        with self._writing:
            if self.n_bytes + n_bytes > self._max_bytes:
                raise RequestTooLargeError(
                    f"files and batches would exceed {self._max_bytes} bytes "
                    "(setting batch_dir_bytes); delete files"
                )
            self.n_bytes += n_bytes

    def create(
        self, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None, now: float
    ) -> StoredBatch:
        """Return a new batch, not yet on the disk. Raises ConflictError for one too many."""
        mine = [one for one in self.batches.values() if one.owner == file.owner]
        if len(mine) >= self._max_batches:
            ended = next((one for one in mine if one.status in ENDED), None)
            if ended is None:
                message = f"{len(mine)} batches have not ended, the limit (setting max_batches)"
                raise ConflictError(f"{message}; wait for one to end")
            del self.batches[ended.id]
            self._batches.joinpath(f"{ended.id}.json").unlink()
            self.n_bytes -= RECORD_BYTES
        self.take(RECORD_BYTES)
        answers, failures = (f"file-{secrets.token_hex(12)}" for _ in range(2))
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=file.id,
            created_at=int(now),
            expires_at=int(now) + WINDOW,
            metadata=None if metadata is None else dict(metadata),
            owner=file.owner,
            answers=answers,
            failures=failures,
        )
        self.batches[batch.id] = batch
        return batch

    def save(self, batch: StoredBatch) -> None:
        """Write a batch as it is now."""
        self._write(self._batches / f"{batch.id}.json", batch)

    @property
    def unfinished(self) -> list[StoredBatch]:
        """The batches that have not ended."""
        return [batch for batch in self.batches.values() if batch.status not in ENDED]

    def _write(self, path: Path, record: StoredFile | StoredBatch) -> None:
        part = path.with_suffix(".part")
        with self._writing:
            part.write_bytes(record.model_dump_json().encode())
            sync(part)
            part.rename(path)
            sync(path.parent)


class Upload:
    """A content that is written before it is a file: `keep` it or `discard` it."""

    def __init__(self, store: BatchStore, file_id: str) -> None:
        self._store, self.id = store, file_id
        self._file = store.path(file_id).open("xb")
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        """Append to the content. Raises RequestTooLargeError."""
        self._store.take(len(data))
        self.n_bytes += len(data)
        self._file.write(data)

    def keep(self, owner: str, filename: str) -> StoredFile:
        """Return the file, once it is on the disk. Raises RequestTooLargeError."""
        self._store.take(RECORD_BYTES)
        self._file.close()
        sync(self._store.path(self.id))
        file = StoredFile(
            id=self.id,
            bytes=self.n_bytes,
            created_at=int(time()),
            filename=filename,
            purpose="batch",
            owner=owner,
        )
        self._store.describe(file)
        return file

    def discard(self) -> None:
        """Remove the content, unless it was kept."""
        if self.id not in self._store.files:
            with suppress(OSError):  # bytes that no longer fit on the disk
                self._file.close()
            written = self._store.path(self.id).stat().st_size
            self._store.discard(self.id)
            self._store.n_bytes -= self.n_bytes - written


def _read(folder: Path, kind: type[Record]) -> dict[str, Record]:
    """Return the descriptions in a folder by id. Raises OSError and ValidationError."""
    records = [kind.model_validate_json(path.read_bytes()) for path in folder.glob("*.json")]
    return {one.id: one for one in sorted(records, key=lambda one: (one.created_at, one.id))}
