"""Checkpoints on this machine, told from model directories, with a hash of what they hold."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from kvasir.model.directory import GRAPH_FILE, MANIFEST_FILE, newest_checkpoint
from kvasir.model.download.choice import GGUF_PART
from kvasir.model.download.pull import Found
from kvasir.model.download.reference import Reference

_READ = frozenset({".json", ".jinja", ".gguf", ".model", ".safetensors", ".spm", ".txt"})
_WHOLE = 2**22  # bytes; larger files are sampled
_PIECE = 2**16  # bytes
_N_PIECES = 64


def find_local(path: Path) -> Found | None:
    """Return a checkpoint, a run's newest, a Hugging Face folder or a GGUF file; None for others.

    Its revision hashes the names, sizes and times of change of the files that export reads, the
    content of small ones, and of large ones 64 pieces of 64 KiB, so that gigabytes take no time.
    """
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if is_gguf:
        part = GGUF_PART.fullmatch(path.name)
        files = path.parent.glob(f"{glob.escape(part[1])}-*.gguf") if part else iter((path,))
    else:
        folder = newest_checkpoint(path)
        is_exported = (path / MANIFEST_FILE).is_file() and (path / GRAPH_FILE).is_file()
        if folder is None or is_exported or not any(folder.glob("*.safetensors")):
            return None
        files = chain(folder.glob("*"), folder.glob("*/*"))  # modules of sentence-transformers
    hashed = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in _READ and file.is_file()):
        for piece in _pieces(file):
            hashed.update(piece)
    name = path.stem if is_gguf else path.resolve().name
    place = path.parent if is_gguf else path
    names = [path.name if is_gguf else "."]
    return Found(Reference("file", name, name), hashed.hexdigest(), lambda _: (place, names))


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield a file's name, size and time of change, and its content or pieces of it."""
    status = file.stat()
    yield f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode()
    with file.open("rb") as content:
        if status.st_size <= _WHOLE:
            yield content.read()
            return
        for i in range(_N_PIECES):
            content.seek((status.st_size - _PIECE) * i // (_N_PIECES - 1))
            yield content.read(_PIECE)
