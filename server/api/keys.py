"""The keys that open the API: one from the settings, others from a file that may change while the server runs."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import logging
import secrets
import threading
from pathlib import Path

from server.errors import StartupError

logger = logging.getLogger("kvasir")

LARGEST_FILE = 2**20  # bytes

Stamp = tuple[int, int, int]  # of a file's content: modification time in nanoseconds, inode, size


class ApiKeys:
    """Which keys are known. Raises StartupError for a file that gives none, and for a key that nobody could send.

    Only digests are kept, keyed by a secret of this process: looking one up takes a time that says nothing about any
    key, and a digest that is shown gives no key away.
    """

    def __init__(self, key: str | None = None, path: Path | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._path = path
        self._reloading = threading.Lock()
        try:
            self._fixed = frozenset(
                [self._digest(_stripped(key.encode()))] if key is not None else []
            )
        except ValueError as error:
            raise StartupError(f"api_key: {error}") from None
        self._stamp = self._current_stamp()
        try:
            self._known = self._fixed | (self._read(path) if path is not None else frozenset())
        except (OSError, ValueError) as error:
            raise StartupError(f"api_key_file {path}: {error}") from None

    @property
    def is_open(self) -> bool:
        """Whether there are no keys, and nobody needs one."""
        return not self._known

    async def find(self, key: bytes) -> bytes | None:
        """What a known key is told apart by; None for an unknown one. A file that has changed is read first."""
        if self._path is not None and (stamp := self._current_stamp()) != self._stamp:
            await asyncio.to_thread(self._reload, self._path, stamp)
        digest = self._digest(key)
        return digest if digest in self._known else None

    def _reload(self, path: Path, stamp: Stamp | None) -> None:
        """Take the file's keys; the old ones stay where it gives none. All who notice a change wait for the first."""
        with self._reloading:
            if stamp == self._stamp:
                return
            try:
                self._known = self._fixed | self._read(path)
            except (OSError, ValueError) as error:
                logger.error("api_key_file %s: %s; the keys stay as they were", path, error)
            else:
                logger.info(
                    "api_key_file has changed", extra={"fields": {"keys": len(self._known)}}
                )
            self._stamp = stamp

    def _read(self, path: Path) -> frozenset[bytes]:
        """Digests of the file's keys. Raises OSError, or ValueError without a word of what it holds."""
        if not path.is_file():
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        lines = [line.strip() for line in content.removeprefix(codecs.BOM_UTF8).splitlines()]
        keys = {_stripped(line) for line in lines if line and not line.startswith(b"#")}
        if not keys:
            raise ValueError("it holds no key; write one on each line")
        return frozenset(map(self._digest, keys))

    def _current_stamp(self) -> Stamp | None:
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).digest()


def _stripped(key: bytes) -> bytes:
    """Without the space around it, which no header keeps. Raises ValueError without a word of what it is."""
    key = key.strip()
    if not key or any(byte <= ord(" ") or byte == 0x7F for byte in key):
        raise ValueError(
            "a key is empty, or has a space or a control character in it; "
            "write one key on each line, and comments on lines of their own"
        )
    return key
