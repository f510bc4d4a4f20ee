"""A directory that is written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it when all went well, and vanishes, with the parents made for it, when not.

    Raises FileExistsError when `out` is in use.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose another --out or remove it")
    part = out.with_name(out.name + ".part")
    missing = [folder for folder in part.parents if not folder.exists()]
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if out.exists():
            out.rmdir()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for folder in missing:
            if any(folder.iterdir()):
                break
            folder.rmdir()
        raise
