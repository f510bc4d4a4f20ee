"""kvasir pull: a model from a store; and models that other commands name by a store's reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer import Argument, Exit

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.model.directory import FORMAT_VERSION, MANIFEST_FILE
from kvasir.model.download.pull import find
from kvasir.model.download.reference import Reference
from kvasir.model.platform.progress import Progress
from kvasir.server.settings import user_cache

_REFERENCE = (
    "hf://org/name, with @revision or /file.gguf; oci://registry/name:tag; s3://bucket/prefix."
)


def pull(
    reference: str = Argument(help=_REFERENCE), cache_dir: CacheDir = None, as_json: Json = False
) -> None:
    """Bring a model from Hugging Face's hub, an OCI registry or S3, and print its folder.

    Only what Kvasir needs is brought, once: the hub's files lie in Hugging Face's own cache.
    export, serve and train --init take the same references.
    """
    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        wanted = Reference.parse(reference)
        if wanted is None:
            raise ValueError(f"{reference!r} is no reference; write {_REFERENCE.rstrip('.')}")
        model = find(wanted, cache_dir or user_cache())
        folder = model.pull(progress)
    values = {"reference": str(wanted), "revision": model.revision, "path": str(folder)}
    where = ("--cache-dir", cache_dir) if cache_dir else ()
    show(as_json, values, str(folder), then=("serve", str(wanted), *where))


def on_this_machine(source: Path, cache_dir: Path | None, progress: Progress) -> Path:
    """Return a path as it is, and the folder or file of a reference, pulled."""
    reference = Reference.parse(source)
    return find(reference, cache_dir or user_cache()).pull(progress) if reference else source


def served_directory(given: Path, name: str | None, cache_dir: Path | None) -> Path:
    """Return NAME=DIR for a reference, perhaps with a name: pulled, exported once if need be."""
    chosen, is_named, text = str(given).partition("=")
    with one_line_errors():
        reference = Reference.parse(text if is_named else given)
    if reference is None:
        return given
    with one_line_errors(), ProgressBar(takes_minutes=True) as progress:
        cache = cache_dir or user_cache()
        model = find(reference, cache)
        directory = cache / "models" / model.key(f"format {FORMAT_VERSION}")
        source = directory if directory.is_dir() else model.pull(progress)
    if not (source / MANIFEST_FILE).is_file():
        _export(source, directory)
        source = directory
    return Path(f"{chosen if is_named else name or reference.name}={source}")


def _export(source: Path, directory: Path) -> None:
    """Export in a process of its own, so that PyTorch leaves the server's memory."""
    command = [sys.executable, "-m", "kvasir", "export", str(source), "--out", str(directory)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:  # noqa: S603
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    if code:
        raise Exit(code)
