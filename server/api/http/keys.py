"""The API keys: one from the settings, others from a file that may change while the server runs."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import logging
import re
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import Scope

from kvasir.model.platform.files import Stamp, stamp_of
from kvasir.server.errors import AuthenticationError, StartupError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.state import State

logger = logging.getLogger("kvasir")

LARGEST_FILE = 2**20  # bytes
_SHORTEST_SALT = 16  # characters

_NUMBER = "[1-9][0-9]{0,8}"
_FIELDS = {"name": "[A-Za-z0-9._@-]{1,64}", "concurrency": _NUMBER, "tokens_per_minute": _NUMBER}


class Limits(NamedTuple):
    """One caller's limits: requests in flight, and tokens a minute. None is no limit."""

    concurrency: int | None = None
    tokens_per_minute: int | None = None


def require_key(scope: Scope, key: SecretStr | None, name: str) -> None:
    """Raise AuthenticationError unless a request has the key of a setting, and there is one."""
    given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ").strip()
    expected = "" if key is None else key.get_secret_value()
    if not expected or not secrets.compare_digest(given.encode(), expected.encode()):
        message = f"no valid key; send {name}'s as: Authorization: Bearer KEY"
        raise AuthenticationError(message)


class ApiKeys:
    """The known keys. Raises StartupError for a file without keys, and for a key nobody can send.

    Only digests are kept, keyed by a secret of this process, or of all replicas, the salt: the time
    of a lookup says nothing about any key, and a leaked digest reveals none. Keys of one name are
    one caller; the setting's is named `default`, and one without a name by its line. A caller
    outlives changes of the file. state: counts what callers use.
    """

    def __init__(
        self,
        key: str | None = None,
        path: Path | None = None,
        salt: str | None = None,
        state: State | None = None,
    ) -> None:
        if salt is not None and len(salt) < _SHORTEST_SALT:
            raise StartupError(
                f"salt: it has {len(salt)} characters, fewer than {_SHORTEST_SALT}; "
                "make one with: openssl rand -hex 32"
            )
        self._secret = secrets.token_bytes(32)
        if salt is not None:
            self._secret = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        self._state = state or MemoryState()
        self._path, self._stamp = path, path and stamp_of(path)
        self.has_failed = False  # to take the file's last change
        self._reloading = threading.Lock()
        self._fixed: list[tuple[bytes, Caller]] = []  # by digest
        self._callers: dict[bytes, Caller] = {}  # by digest
        source = "api_key"
        try:
            if key is not None:
                self._fixed = [self._entry(_stripped(key.encode()), "default", Limits())]
            source = f"api_key_file {path}"
            self._take([] if path is None else self._read(path))
        except (OSError, ValueError) as error:
            raise StartupError(f"{source}: {error}") from None

    async def find(self, key: bytes) -> Caller | None:
        """Return a known key's caller; None for an unknown key. A changed file is read first."""
        if self._path is not None and (stamp := stamp_of(self._path)) != self._stamp:
            await asyncio.to_thread(self._reload, self._path, stamp)
        return self._callers.get(self._digest(key))

    def named(self, name: str) -> Caller | None:
        """Return the caller of a name that a key has; None for another name."""
        return next((caller for caller in self._callers.values() if caller.name == name), None)

    def _reload(self, path: Path, stamp: Stamp | None) -> None:
        """Take the file's keys, if it has any. Concurrent callers wait for the first."""
        with self._reloading:
            if stamp == self._stamp:
                return
            try:
                self._take(self._read(path))
            except (OSError, ValueError) as error:
                logger.error("api_key_file %s: %s; the keys stay as they were", path, error)
                self.has_failed = True
            else:
                self.has_failed = False
                fields = {"keys": len(self._callers)}
                logger.info("api_key_file has changed", extra={"fields": fields})
            self._stamp = stamp

    def _take(self, read: list[tuple[bytes, Caller]]) -> None:
        """Know these keys and the fixed one, with the callers that are known already."""
        by_id = {caller.salt: caller for caller in self._callers.values()}
        by_digest = {}
        for digest, new in (*self._fixed, *read):
            caller = by_digest[digest] = by_id.setdefault(new.salt, new)
            caller.name, caller.concurrency = new.name, new.concurrency
            caller.tokens_per_minute = new.tokens_per_minute
        self._callers = by_digest

    def _read(self, path: Path) -> list[tuple[bytes, Caller]]:
        """Return callers by their keys' digests. Raises OSError, or ValueError without content."""
        if not path.is_file():
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        read, default = list[tuple[bytes, Caller]](), Limits()
        limits: dict[bytes, Limits] = {}  # by the caller's id
        lines = content.removeprefix(codecs.BOM_UTF8).splitlines()
        for n, line in enumerate(map(bytes.strip, lines), 1):
            if not line or line.startswith(b"#"):
                continue
            first, *fields = line.split()
            if first == b"*":
                given = _given(fields, n)
                if "name" in given:
                    raise ValueError(f"line {n}: after * may stand limits, but no name")
                default = _limits(given, Limits())
                continue
            *fields, key = line.split()
            given = _given(fields, n)
            if key.partition(b"=")[0].decode("ascii", "replace") in _FIELDS:
                raise ValueError(f"line {n}: there is no key after the name and the limits")
            own = _limits(given, default)
            read.append(self._entry(_stripped(key), given.get("name"), own, f"line-{n}"))
            if limits.setdefault(read[-1][1].salt, own) != own:
                raise ValueError(f"line {n}: an earlier line gives this name other limits")
        if not read:
            raise ValueError("it holds no key; write one on each line")
        return read

    def _entry(
        self, key: bytes, name: str | None, limits: Limits, place: str = ""
    ) -> tuple[bytes, Caller]:
        digest = self._digest(key)
        # No key has a space in it, so none has the digest of a name.
        caller_id = self._digest(b"name " + name.encode()) if name else digest
        return digest, Caller(name or place, caller_id, *limits, self._state, caller_id)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).digest()


def _given(fields: list[bytes], n: int) -> dict[str, str]:
    """Return the name and limits that stand before the key of line n. Raises ValueError."""
    given: dict[str, str] = {}
    for field in fields:
        name, _, value = field.decode("ascii", "replace").partition("=")
        if name in given or name not in _FIELDS or not re.fullmatch(_FIELDS[name], value):
            raise ValueError(
                f"line {n}: before a key may stand only name=N (letters, digits and ._@-), "
                "concurrency=N and tokens_per_minute=N; a key has no space in it"
            )
        given[name] = value
    return given


def _limits(given: dict[str, str], default: Limits) -> Limits:
    """Return a line's limits, with the default of those that it leaves out."""
    return default._replace(**{name: int(given[name]) for name in Limits._fields if name in given})


def _stripped(key: bytes) -> bytes:
    """Return a key without space around it. Raises ValueError if it is empty or cannot be sent."""
    key = key.strip()
    if not key or any(byte <= ord(" ") or byte == 0x7F for byte in key):
        raise ValueError(
            "a key is empty, or has a space or a control character in it; "
            "write one key on each line, and comments on lines of their own"
        )
    return key
