"""A disk without room, at any write: batches wait or end, and nothing is lost or left over."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from kvasir.server.api.http.upload import Content
from kvasir.server.batches import worker as batch_worker
from kvasir.server.batches.journal import Reply
from kvasir.server.batches.store import BatchStore
from tests.batches.test_store import worker
from tests.kit.batches import ENDPOINT, check_whole, doubled, upload

FOREVER = 10**9


class Disk:
    """A disk on which all writes from number `first` to `last` find no room.

    Until then the store's reserve is its last room, of which each description takes a part.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lock: Path) -> None:
        self._lock = lock
        self.n, self.first, self.last = 0, FOREVER, FOREVER
        file = type("File", (io.FileIO,), {})  # whose attributes can be set
        monkeypatch.setattr(io, "FileIO", file)
        patched = (Path, "write_bytes"), (Path, "rename"), (file, "write"), (Content, "write")
        for owner, name in (*patched, (os, "fsync"), (os, "posix_fallocate")):
            monkeypatch.setattr(owner, name, self._limited(getattr(owner, name), name))

    def _limited(self, write: Callable[..., Any], name: str) -> Callable[..., Any]:
        def limited(*arguments: Any) -> Any:
            self.n += 1
            is_given = name != "posix_fallocate" and self._lock.stat().st_size < 2**18
            is_full = self.first <= self.n < self.last
            if not is_full or (is_given and name != "write"):
                return None if name == "fsync" else write(*arguments)
            if name.startswith("write"):  # some of it fits
                write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return limited


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def retried(work: Callable[[], Any]) -> Any:
    """Do as a client: try again when the disk was full."""
    while True:
        try:
            found = work()
            return await found if asyncio.iscoroutine(found) else found
        except OSError:
            continue


@pytest.mark.parametrize("length", [1, 2, 5, 20])
async def test_whatever_write_fails_the_batch_ends_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(batch_worker, "_PAUSE", 0)
    monkeypatch.setattr("kvasir.server.batches.journal._SYNC_SECONDS", 0)
    disk = Disk(monkeypatch, tmp_path / "lock")
    store = BatchStore(tmp_path, max_bytes=10**6)
    working = worker(store)
    while disk.first == FOREVER or disk.n >= disk.last:
        disk.first = 0 if disk.first == FOREVER else disk.first + 1
        disk.n, disk.last = 0, disk.first + length
        file = store.files[await retried(lambda: upload(store))]
        assert len(store.files) == 1
        batch = await retried(lambda: working.create(file, ENDPOINT, None))  # noqa: B023
        assert [*store.batches.values()] == [batch]
        await working.tasks[batch.id]
        check_whole(store, batch)
        assert not working.waiting
        for one in [*store.files.values()]:
            store.delete(one)
        store.forget(batch)
        assert store.n_bytes == 0
        assert list_files(tmp_path) == [tmp_path / "lock"]
    assert disk.first > 20
    await working.close()
    store.close()


@pytest.mark.parametrize("is_valid", [False, True])
async def test_a_batch_is_cancelled_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_valid: bool
) -> None:
    monkeypatch.setattr(batch_worker, "_PAUSE", 0)
    disk = Disk(monkeypatch, tmp_path / "lock")
    store = BatchStore(tmp_path, max_bytes=10**6)
    loop, waiting = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(store, "has_room", lambda *_: bool(loop.call_soon_threadsafe(waiting.set)))

    async def answer(path: str, body: bytes, owner: str) -> Reply | float:
        disk.first = disk.n
        return await doubled(path, body, owner)

    working = worker(store, answer)
    file = store.files[await upload(store)]
    batch = await working.create(file, ENDPOINT, None)
    disk.first = FOREVER if is_valid else disk.n
    await waiting.wait()
    await working.cancel(batch)
    if batch.id in working.tasks:
        await working.tasks[batch.id]
    store.delete(file)
    await working.close()
    store.close()
    again = BatchStore(tmp_path, max_bytes=10**6)
    assert again.batches[batch.id].status == "cancelled"
    assert again.n_bytes == 4096
    again.close()


async def test_an_error_does_not_hide_the_end_of_the_server(tmp_path: Path) -> None:
    """Close while the error of a line ends the others."""
    store = BatchStore(tmp_path, max_bytes=10**6)
    closing: list[asyncio.Task[None]] = []
    begun = asyncio.Event()

    async def answer(_path: str, body: bytes, _owner: str) -> Reply | float:
        if from_json(body)["prompt"] == 0:
            await begun.wait()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            begun.set()
            return await asyncio.Future[Reply]()
        finally:
            closing.append(asyncio.create_task(working.close()))
            await asyncio.sleep(0)

    working = worker(store, answer)
    batch = await working.create(store.files[await upload(store)], ENDPOINT, None)
    await asyncio.wait([working.tasks[batch.id]])  # cancelled, since Python 3.13
    await closing[0]
    store.close()
