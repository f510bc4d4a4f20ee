"""The answers of a batch: two files that grow by whole lines."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from pydantic_core import from_json

from kvasir.server.batches.objects import BatchUsage, Counts, StoredBatch, StoredFile
from kvasir.server.batches.store import BatchStore

_BEGIN = b'{"id":"batch_req_'  # of each line
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
    """The answers to `n_requests` so far: each is appended once. `read` it first.

    What follows the last whole line is removed, in case a crash or a full disk cut a line off. One
    thread at a time may use it. paths: the files of answers and of failures. count: told of bytes
    that are about to be written or, if less than 0, that are there no more. answered: hashes of
    custom ids. Raises OSError.
    """

    def __init__(
        self, paths: Sequence[Path], n_requests: int, count: Callable[[int], None] | None = None
    ) -> None:
        self._paths, self._take = paths, count or (lambda _: None)
        self.answered: set[int] = set()
        self.usage = BatchUsage()
        self.counts = Counts(total=n_requests)
        self._files: list[io.FileIO] = []
        self._synced_at = monotonic()

    @classmethod
    def of(cls, store: BatchStore, batch: StoredBatch) -> Journal:
        """Return that of a batch in a store."""
        paths = store.path(batch.answers), store.path(batch.failures)
        return cls(paths, batch.request_counts.total, partial(store.take, owner=batch.owner))

    def read(self, asked: Container[int] | None = None) -> Iterator[None]:
        """Open the files, and read their answers, one in each step.

        asked: hashes of custom ids. Raises ValueError for a file that has anything but answers to
        them, and leaves it as it is; None is a file of the store's own.
        """
        for path in self._paths:
            end, file = 0, io.FileIO(path, "ab")
            self._files.append(file)
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        answer = from_json(line) if line.endswith(b"\n") else {}
                        response = answer["response"] or {"status_code": 0, "body": None}
                        self._count(answer["custom_id"], response["status_code"], response["body"])
                        is_asked = asked is None or hash(answer["custom_id"]) in asked
                    except (ValueError, LookupError, TypeError):
                        is_begun = _BEGIN.startswith(line[: len(_BEGIN)])
                        if asked is None or (is_begun and not line.endswith(b"\n")):
                            break
                        is_asked = False
                    if not is_asked:
                        raise ValueError(f"line {number} of {path} answers none of the requests")
                    end += len(line)
                    yield
            n_more = path.stat().st_size - end
            file.truncate(end)
            self._take(-n_more)

    def _count(self, custom_id: str, status_code: int, content: Any) -> None:
        self.answered.add(hash(custom_id))
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
        fields = reply.status_code, json.dumps(reply.request_id).encode(), body
        response = b'{"status_code":%d,"request_id":%b,"body":%b}' % fields
        self._append(custom_id, response, b"null", reply.status_code)
        self._count(custom_id, reply.status_code, reply.content)

    def leave_out(self, custom_id: str, code: str, message: str) -> None:
        """Answer a request that is not executed. Raises as `append` does."""
        error = json.dumps({"code": code, "message": message}).encode()
        self._append(custom_id, b"null", error, 0)
        self._count(custom_id, 0, None)

    def _append(self, custom_id: str, response: bytes, error: bytes, status_code: int) -> None:
        head = f'{secrets.token_hex(12)}","custom_id":{json.dumps(custom_id)}'.encode()
        line = rest = b'%b%b,"response":%b,"error":%b}\n' % (_BEGIN, head, response, error)
        self._take(len(line))
        file = self._files[_is_failure(status_code)]
        end = os.fstat(file.fileno()).st_size
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            self._take(-len(line))
            raise

    @property
    def is_due(self) -> bool:
        """True if answers should be written through to the disk."""
        return monotonic() - self._synced_at >= _SYNC_SECONDS

    def sync(self) -> None:
        """Write the answers through to the disk."""
        self._synced_at = monotonic()
        for file in self._files:
            os.fsync(file.fileno())

    def publish(self, store: BatchStore, batch: StoredBatch, now: float) -> None:
        """Make files of what was written, and name them in the batch."""
        self.sync()
        for file_id, name in (batch.answers, "output"), (batch.failures, "error"):
            size = store.path(file_id).stat().st_size
            if not size:
                store.discard(file_id, batch.owner)
                continue
            setattr(batch, f"{name}_file_id", file_id)
            store.describe(
                StoredFile(
                    id=file_id,
                    bytes=size,
                    created_at=int(now),
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose="batch_output",
                    owner=batch.owner,
                ),
                reserved=True,
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _is_failure(status_code: int) -> bool:
    return not 200 <= status_code < 400
