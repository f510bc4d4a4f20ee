"""What a file system has against it, in one line with the path."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_words(error: object) -> str:
    """The line for an error; an OSError's own begins with its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror[:1].lower() + error.strerror[1:]
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason


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


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors', which is Rust's
        return int(found[1])
    cut = re.fullmatch(r"\d+ requested and \d+ written|problem writing element \d+ to file", str(error))  # numpy's
    return errno.ENOSPC if cut else None
