"""The answers of a batch: two files that grow by whole lines."""

from __future__ import annotations

import io
import json
import os
import secrets
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from pydantic_core import from_json

from server.batches.objects import BatchUsage, Counts, StoredBatch, StoredFile
from server.batches.store import RECORD_BYTES, BatchStore

_SYNC_SECONDS = 1.0  # whose answers are computed again after a power failure


# They end a line for Python's splitlines, and stand in strings only, where they can be escaped.
_LINE_ENDS = {
    character.encode(): json.dumps(character).strip('"').encode()
    for character in ("\x85", "\u2028", "\u2029")
}


class Reply(NamedTuple):
    """The answer to a request. content: that of the body, parsed."""

    status_code: int
    request_id: str
    body: bytes
    content: Any


class Journal:
    """The answers to a batch's requests so far, by their custom ids: each is appended once.

    What follows the last whole line is removed, in case a crash cut a line off. One thread at a
    time may use it. Raises OSError.
    """

    def __init__(self, store: BatchStore, batch: StoredBatch) -> None:
        self._store, self._batch = store, batch
        self.answered: set[str] = set()
        self.usage = BatchUsage()
        self.counts = Counts(total=batch.request_counts.total)
        self._ids = {False: batch.answers, True: batch.failures}
        self._files = {failed: self._reopen(store.path(i)) for failed, i in self._ids.items()}
        self._synced_at = monotonic()

    def _reopen(self, path: Path) -> io.FileIO:
        """Read the answers in a file, and return it, open behind the last."""
        end = 0
        file = io.FileIO(path, "ab")
        with path.open("rb") as lines:
            for line in lines:
                try:
                    answer = from_json(line) if line.endswith(b"\n") else {}
                    response = answer["response"] or {"status_code": 0, "body": None}
                    self._count(answer["custom_id"], response["status_code"], response["body"])
                except (ValueError, LookupError, TypeError):
                    break
                end += len(line)
        self._store.n_bytes -= path.stat().st_size - end
        file.truncate(end)
        return file

    def _count(self, custom_id: str, status_code: int, content: Any) -> None:
        self.answered.add(custom_id)
        if _is_failure(status_code):
            self.counts.failed += 1
        else:
            self.counts.completed += 1
            self.usage.add(content)

    def append(self, custom_id: str, reply: Reply) -> None:
        """Answer a request. Raises OSError or RequestTooLargeError, and then writes nothing."""
        body = reply.body
        for end, escaped in _LINE_ENDS.items():
            body = body.replace(end, escaped)
        response = (
            f'{{"status_code":{reply.status_code},"request_id":{json.dumps(reply.request_id)}'
        )
        rest = b'"response":%b,"body":%b},"error":null' % (response.encode(), body)
        self._append(custom_id, rest, is_failure=_is_failure(reply.status_code))
        self._count(custom_id, reply.status_code, reply.content)

    def leave_out(self, custom_id: str, code: str, message: str) -> None:
        """Answer a request that is not executed. Raises as `append` does."""
        error = json.dumps({"code": code, "message": message}).encode()
        self._append(custom_id, b'"response":null,"error":' + error, is_failure=True)
        self._count(custom_id, 0, None)

    def _append(self, custom_id: str, rest: bytes, *, is_failure: bool) -> None:
        head = f'{{"id":"batch_req_{secrets.token_hex(12)}","custom_id":{json.dumps(custom_id)},'
        line = head.encode() + rest + b"}\n"
        self._store.take(len(line))
        file = self._files[is_failure]
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(size)
            self._store.n_bytes -= len(line)
            raise

    @property
    def is_due(self) -> bool:
        """True if answers should be written through to the disk."""
        return monotonic() - self._synced_at >= _SYNC_SECONDS

    def sync(self) -> None:
        """Write the answers through to the disk."""
        self._synced_at = monotonic()
        for file in self._files.values():
            os.fsync(file.fileno())

    def publish(self, now: float) -> None:
        """Make files of what was written, and name them in the batch."""
        self.sync()
        batch = self._batch
        for is_failure, name in (False, "output"), (True, "error"):
            file_id = self._ids[is_failure]
            size = self._store.path(file_id).stat().st_size
            if not size:
                self._store.discard(file_id)
                continue
            setattr(batch, f"{name}_file_id", file_id)
            if file_id not in self._store.files:  # as after a crash
                self._store.n_bytes += RECORD_BYTES
            self._store.describe(
                StoredFile(
                    id=file_id,
                    bytes=size,
                    created_at=int(now),
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose="batch_output",
                    owner=batch.owner,
                )
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _is_failure(status_code: int) -> bool:
    return not 200 <= status_code < 400
