"""Files and directories: written whole or not at all, with errors that name the path."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def in_words(error: object) -> str:
    """The line for an error; an OSError's own begins with its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror[:1].lower() + error.strerror[1:]
    return (
        f"{os.fsdecode(error.filename)}: {reason}"
        if isinstance(error.filename, str | bytes)
        else reason
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Libraries that write below `path` name neither it nor, some of them, the reason: raises OSError with both."""
    from safetensors import SafetensorError  # noqa: PLC0415  not where only serving is installed

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = None if getattr(error, "filename", None) is not None else _number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it when all went well, and vanishes, with the parents made for it, when not.

    Raises FileExistsError when `out` is in use, and OSError naming it when it cannot be written.
    """
    if out.name in ("", ".."):
        raise FileExistsError(f"{out} cannot be replaced; name a new folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose another --out or remove it")
    parent = out.absolute().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(
                prefix=f"{out.name}.part-", dir=parent, ignore_cleanup_errors=True
            ) as place,
            writing(out),
        ):
            part = Path(
                place, out.name
            )  # within a folder that only its owner may enter, but not like it
            part.mkdir()
            yield part
            if out.exists():
                out.rmdir()
            part.rename(out)
    except BaseException as error:
        for folder in missing:
            if not folder.exists() or any(folder.iterdir()):
                break
            folder.rmdir()
        if isinstance(error, OSError) and str(error.filename).startswith(
            f"{parent / out.name}.part-"
        ):
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors', which is Rust's
        return int(found[1])
    cut = re.fullmatch(
        r"\d+ requested and \d+ written|problem writing element \d+ to file", str(error)
    )  # numpy's
    return errno.ENOSPC if cut else None
