"""The API keys: one from the settings, others from a file that may change while the server runs."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import logging
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from server.errors import StartupError

logger = logging.getLogger("kvasir")

LARGEST_FILE = 2**20  # bytes

Stamp = tuple[int, int, int]  # of a file's content: modification time in nanoseconds, inode, size


class ApiKeys:
    """The known keys. Raises StartupError for a file without keys, and for a key nobody can send.

    Only digests are kept, keyed by a secret of this process: the time of a lookup says nothing
    about any key, and a leaked digest reveals none.
    """

    def __init__(self, key: str | None = None, path: Path | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._path, self._stamp = path, _current_stamp(path)
        self._reloading = threading.Lock()
        self._fixed = frozenset[bytes]()
        source = "api_key"
        try:
            if key is not None:
                self._fixed = frozenset({self._digest(_stripped(key.encode()))})
            source = f"api_key_file {path}"
            self._known = self._fixed | (frozenset() if path is None else self._read(path))
        except (OSError, ValueError) as error:
            raise StartupError(f"{source}: {error}") from None

    async def find(self, key: bytes) -> bytes | None:
        """Return a known key's digest; None for an unknown key. A changed file is read first."""
        if self._path is not None and (stamp := _current_stamp(self._path)) != self._stamp:
            await asyncio.to_thread(self._reload, self._path, stamp)
        digest = self._digest(key)
        return digest if digest in self._known else None

    def _reload(self, path: Path, stamp: Stamp | None) -> None:
        """Take the file's keys, if it has any. Concurrent callers wait for the first."""
        with self._reloading:
            if stamp == self._stamp:
                return
            try:
                self._known = self._fixed | self._read(path)
            except (OSError, ValueError) as error:
                logger.error("api_key_file %s: %s; the keys stay as they were", path, error)
            else:
                fields = {"keys": len(self._known)}
                logger.info("api_key_file has changed", extra={"fields": fields})
            self._stamp = stamp

    def _read(self, path: Path) -> frozenset[bytes]:
        """Return digests of the file's keys. Raises OSError, or ValueError without its content."""
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

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).digest()


def _current_stamp(path: Path | None) -> Stamp | None:
    if path is not None:
        with suppress(OSError):
            status = path.stat()
            return status.st_mtime_ns, status.st_ino, status.st_size
    return None


def _stripped(key: bytes) -> bytes:
    """Return a key without space around it. Raises ValueError if it is empty or cannot be sent."""
    key = key.strip()
    if not key or any(byte <= ord(" ") or byte == 0x7F for byte in key):
        raise ValueError(
            "a key is empty, or has a space or a control character in it; "
            "write one key on each line, and comments on lines of their own"
        )
    return key
