"""A directory that is written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from model.file_errors import writing


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
            TemporaryDirectory(prefix=f"{out.name}.part-", dir=parent, ignore_cleanup_errors=True) as place,
            writing(out),
        ):
            part = Path(place, out.name)  # within a folder that only its owner may enter, but not like it
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
        if isinstance(error, OSError) and str(error.filename).startswith(f"{parent / out.name}.part-"):
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise
