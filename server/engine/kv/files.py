"""Prompt blocks as files, which outlive the process and may be shared by those of one machine.

A file holds what one block's memory held, and is restored to the same bytes or not at all. A block
is written when a second prompt begins with it. Files lie in a folder for each fingerprint: all on
which the bytes depend. The least recently used file of all folders goes first; a chain is marked as
used from its end to its beginning, so no file outlives its parent.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from secrets import token_hex
from typing import Any, NamedTuple

from numpy.typing import NDArray

logger = logging.getLogger("kvasir")

# magic, fingerprint, name, bytes of the content, CRC of all before and of the content
_HEADER = struct.Struct("<8s16s16sQI")
_MAGIC = b"kvasirp1"
_NAME = re.compile("[0-9a-f]{32}")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}")
_MOST_WAITING = 64 * 2**20  # bytes that wait to be written; what comes beyond is not kept
_LEFT = 0.9  # share of the budget that stays when it is exceeded
_UNCOUNTED = 16  # part of the budget that a process may write before it counts all files again
_STALE = 3600.0  # seconds after which nobody goes on with an unfinished file

Parts = list[NDArray[Any]]  # contiguous arrays, which together hold a block


class _Entry(NamedTuple):
    """A file: when it was last used, in nanoseconds, its size and its path."""

    used_at: int
    size: int
    path: str


class PrefixFiles:
    """Files of blocks under `folder`, for the engine's thread; another one writes and deletes.

    fingerprint: 16 bytes. max_bytes: of all fingerprints' files. Raises OSError if the folder
    cannot be made.
    """

    def __init__(self, folder: Path, fingerprint: bytes, max_bytes: int) -> None:
        self._root, self._folder = folder, folder / fingerprint.hex()
        self._fingerprint, self._max_bytes = fingerprint, max_bytes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._waiting = set[bytes]()  # names of blocks that are to be written
        self._n_bytes = self._n_new = 0  # of all files when they were counted; written since then
        self._has_failed = False
        self._tasks: Queue[Callable[[], None]] = Queue()
        self._tasks.put(self._evict)
        threading.Thread(target=self._work, name="prefix files", daemon=True).start()

    def read(self, name: bytes, parts: Parts) -> bool:
        """Fill the parts with a block; return False if there is none, and they may hold anything.

        A file that is not what was written is deleted.
        """
        path = self._folder / name.hex()
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(_HEADER.size)
                n_read = sum(file.readinto(part.data.cast("B")) for part in parts)
                is_whole = not file.read(1) and n_read == sum(part.nbytes for part in parts)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._failed(error)
            return False
        if not is_whole or head != self._header(name, *(part.data for part in parts)):
            logger.warning(
                "a file of the prefix cache is damaged", extra={"fields": {"file": name.hex()}}
            )
            self._tasks.put(lambda: path.unlink(missing_ok=True))
            return False
        return True

    def keep(self, names: list[bytes], parts_of: Callable[[int], Parts]) -> None:
        """Mark a chain as used, and write its blocks that are no files; `parts_of` has the n-th."""
        if not names:
            return
        try:
            missing = [
                n for n, name in enumerate(names) if not (self._folder / name.hex()).exists()
            ]
        except OSError as error:
            self._failed(error)
            return
        for n in missing:
            if (name := names[n]) in self._waiting:
                continue
            parts = parts_of(n)
            if self._tasks.qsize() * sum(part.nbytes for part in parts) > _MOST_WAITING:
                break
            content = b"".join(part.data for part in parts)
            self._waiting.add(name)
            self._tasks.put(partial(self._write, name, content))
        self._tasks.put(lambda: self._touch(names))

    def wait(self) -> None:
        """Wait until all is written that was kept."""
        self._tasks.join()

    def _header(self, name: bytes, *content: bytes | memoryview) -> bytes:
        crc = zlib.crc32(self._fingerprint + name)
        for part in content:
            crc = zlib.crc32(part, crc)
        n_bytes = sum(memoryview(part).nbytes for part in content)
        return _HEADER.pack(_MAGIC, self._fingerprint, name, n_bytes, crc)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except OSError as error:
                self._failed(error)
            finally:
                self._tasks.task_done()

    def _failed(self, error: OSError) -> None:
        """Log the first failure: the cache in memory goes on without files."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("the files of the prefix cache: %s", error)

    def _write(self, name: bytes, content: bytes) -> None:
        path = self._folder / name.hex()
        unfinished = path.with_suffix(f".{token_hex(4)}")
        try:
            with open(unfinished, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
                file.writelines((self._header(name, content), content))
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            self._waiting.discard(name)
        self._n_new += len(content)

    def _touch(self, names: list[bytes]) -> None:
        now = time.time_ns()
        for n, name in enumerate(reversed(names)):
            with suppress(FileNotFoundError):  # another process may have made room
                os.utime(self._folder / name.hex(), ns=(now + n, now + n))
        if self._n_new > min(self._max_bytes - self._n_bytes, self._max_bytes // _UNCOUNTED):
            self._evict()

    def _evict(self) -> None:
        """Count all files, and delete the least recently used ones beyond the budget."""
        entries = sorted(self._entries())
        self._n_bytes, self._n_new = sum(entry.size for entry in entries), 0
        if self._n_bytes <= self._max_bytes:
            return
        for entry in entries:
            if self._n_bytes <= _LEFT * self._max_bytes:
                break
            Path(entry.path).unlink(missing_ok=True)
            self._n_bytes -= entry.size

    def _entries(self) -> Iterator[_Entry]:
        """Yield all files, and delete unfinished ones that nobody writes any more."""
        for folder in self._root.iterdir():
            if not _NAME.fullmatch(folder.name):
                continue
            for file in os.scandir(folder):
                try:
                    status = file.stat()
                    if _NAME.fullmatch(file.name):
                        yield _Entry(status.st_mtime_ns, status.st_size, file.path)
                    elif _UNFINISHED.fullmatch(file.name) and (
                        time.time_ns() - status.st_mtime_ns > _STALE * 1e9
                    ):
                        Path(file.path).unlink(missing_ok=True)
                except FileNotFoundError:  # another process was faster
                    continue
