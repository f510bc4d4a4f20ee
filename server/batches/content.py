"""The content of a file while it is uploaded."""

from __future__ import annotations

import secrets
from contextlib import suppress
from time import time

from kvasir.model.platform.files import sync
from kvasir.server.batches.objects import StoredFile
from kvasir.server.batches.store import BatchStore


class Content:
    """A content that is written before it is a file: `keep` it, and in any case `close` it."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self._store, self._owner = store, owner
        self._id = f"file-{secrets.token_hex(12)}"
        self._file = store.path(self._id).open("xb")
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        """Append to the content. Raises OSError and RequestTooLargeError."""
        self._store.take(len(data), self._owner)
        self.n_bytes += len(data)
        self._file.write(data)

    def keep(self, filename: str) -> StoredFile:
        """Return the file, once it is on the disk. Raises OSError and RequestTooLargeError."""
        self._file.close()
        sync(self._store.path(self._id))
        file = StoredFile(
            id=self._id,
            bytes=self.n_bytes,
            created_at=int(time()),
            filename=filename,
            purpose="batch",
            owner=self._owner,
        )
        self._store.describe(file)
        return file

    def close(self) -> None:
        """Remove the content, unless it was kept."""
        with suppress(OSError):  # bytes that no longer fit on the disk
            self._file.close()
        if self._id not in self._store.files:
            self._store.path(self._id).unlink(missing_ok=True)
            self._store.take(-self.n_bytes, self._owner)
