"""Files and directories: written whole or not at all, with errors that name the path."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

Stamp = tuple[int, int, int]  # of a file's content: modification time in nanoseconds, inode, size

_NUMPY_DISK_FULL = r"\d+ requested and \d+ written|problem writing element \d+ to file"


def in_words(error: object) -> str:
    """Return an error as one line; an OSError's own line begins with its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror[:1].lower() + error.strerror[1:]
    if isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {reason}"
    return reason


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes with a file's content; None without the file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size
    return None


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file's content. Raises ValueError for anything else."""
    try:
        values = json.loads(content)
        json.dumps(values, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("must hold a JSON object")
    return values


def read_limited(path: Path, most: int = 2**24) -> bytes:
    """Return the content of a file that others wrote.

    Raises OSError for more bytes than `most`, and for a pipe or device, which might never end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return path.read_bytes()


def read_object(path: Path, kind: type[Exception]) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `kind` for other contents, and OSError."""
    try:
        return parse_object(read_limited(path))
    except ValueError as error:
        raise kind(f"{path} {error}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make errors of libraries that write below `path` OSErrors that name it and the reason."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "filename", None) is not None:
            raise
        number = getattr(error, "errno", None)
        if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors, written in Rust
            number = int(match[1])
        elif re.fullmatch(_NUMPY_DISK_FULL, str(error)):
            number = errno.ENOSPC
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


@contextmanager
def new_directory(out: Path, replaced: str | None = None) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out`, once it is on the disk, if all goes well.

    replaced: a folder with this file may be there, and is removed then. On an error the new folder
    and parents made for it are removed. Raises FileExistsError when `out` is in use, and OSError
    naming `out` when it cannot be written.
    """
    if out.name in ("", ".."):
        raise FileExistsError(f"{out} cannot be replaced; name a new folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if replaced is None:
            raise FileExistsError(f"{out} is not empty; choose another --out or remove it")
        if not (out / replaced).is_file():
            raise FileExistsError(f"{out} has no {replaced}, so it is not replaced; remove it")
    parent = out.absolute().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    prefix = f"{out.name}.part-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as place,
            writing(out),
        ):
            # The outer folder is open to its owner alone; the inner one has usual permissions.
            part = Path(place, out.name)
            part.mkdir()
            yield part
            for path in part.rglob("*"):  # safetensors writes for the owner alone
                if path.is_file():
                    path.chmod(part.stat().st_mode & 0o666)
            sync(*part.rglob("*"), part)
            if out.exists() and replaced is not None:
                out.rename(Path(place, "replaced"))
            elif out.exists():
                out.rmdir()  # fails if another process has filled it
            part.rename(out)
            sync(parent)
    except BaseException as error:
        for folder in missing:
            if not folder.exists() or any(folder.iterdir()):
                break
            folder.rmdir()
        if isinstance(error, OSError) and str(error.filename).startswith(str(parent / prefix)):
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise


def sync(*paths: Path) -> None:
    """Write these files, and the names in these folders, through to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
