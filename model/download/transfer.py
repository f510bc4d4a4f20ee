"""Files from a store into a folder of the cache: resumed, verified, and there only when whole."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.model.download.reference import DownloadError
from kvasir.model.platform.files import sync
from kvasir.model.platform.progress import Progress, interruptible

_SMALL_BYTES = 2**22  # of an answer that is no file, as registries limit manifests
INDEX_BYTES = 2**26  # of a file that is read before the others, and of a hub's list of files
CHUNK = 2**16  # bytes
LONGEST_WAIT = 30.0  # seconds for a chunk
_MB = 10**6
_ATTEMPTS = 5  # in a row that bring less than a chunk

# Yields a file's content from an offset on. Raises OSError where a connection ends.
Reader = Callable[[int], Iterable[bytes]]
# Brings a model; returns the folder of its files, which are verified, and their names in it.
Pull = Callable[[Progress], tuple[Path, list[str]]]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store; `matches` compares a copy with the store's hash of it."""

    size: int
    read: Reader
    matches: Callable[[Path], bool]


def digest(path: Path, algorithm: str, prefix: bytes = b"") -> str:
    """Return the hash of a prefix and a file's content, in hex."""
    hashed = hashlib.new(algorithm, prefix, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            hashed.update(chunk)
    return hashed.hexdigest()


def read_whole(source: str, chunks: Iterable[bytes], most: int = _SMALL_BYTES) -> bytes:
    """Return the content in chunks. Raises DownloadError beyond `most` bytes."""
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > most:
            raise DownloadError(f"{source} sends more than {most:,} bytes, which no model needs")
    return bytes(content)


def from_offset(start: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what follows `start` bytes, where a store does not know ranges."""
    for chunk in chunks:
        if kept := chunk[start:]:
            yield kept
        start = max(0, start - len(chunk))


def in_time(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks. Raises TimeoutError, an OSError, if one takes long."""
    remaining = iter(chunks)
    while chunk := interruptible(lambda _: next(remaining, b""), LONGEST_WAIT):
        yield chunk


def transfer(files: Mapping[str, RemoteFile], folder: Path, progress: Progress) -> None:
    """Make a folder of files, unless it exists. Raises DownloadError, and OSError.

    What an interrupted call brought lies beside it, and the next call goes on from there.
    """
    total = sum(file.size for file in files.values())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for other processes
        if folder.is_dir():
            return
        part, before = folder.with_name(f"{folder.name}.part"), 0
        for name, file in files.items():
            target = part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                for done in _fetch(name, file, target):
                    progress(f"pulling {name}, MB", (before + done) // _MB, total // _MB)
            before += file.size
        sync(*part.rglob("*"), part)
        part.rename(folder)
        sync(folder.parent)


def _fetch(name: str, file: RemoteFile, target: Path) -> Iterator[int]:
    """Yield the number of bytes that are there."""
    incomplete = target.with_name(f"{target.name}.incomplete")
    with incomplete.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
        failed, cause = 0, ""
        while (start := out.tell()) < file.size and failed < _ATTEMPTS:
            try:
                for chunk in in_time(file.read(start)):
                    out.write(chunk[: file.size - out.tell()])
                    yield out.tell()
                    if out.tell() == file.size:
                        break
            except OSError as error:
                cause = f": {error}"
            failed = 0 if out.tell() >= start + CHUNK else failed + 1
        if out.tell() != file.size:
            raise DownloadError(
                f"{name} has {out.tell():,} of {file.size:,} bytes{cause}; run this again, and it "
                "goes on from there"
            )
    if not file.matches(incomplete):
        incomplete.unlink()
        raise DownloadError(
            f"{name} does not match the store's hash; run this again, and if that fails publish "
            "the file again"
        )
    incomplete.rename(target)
