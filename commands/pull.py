"""kvasir pull: a model from a store; and models that other commands name by a store's reference."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from glob import escape
from importlib.util import find_spec
from pathlib import Path

import typer
from typer import Argument

from kvasir.commands.cached import models_in
from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.model.directory import FORMAT_VERSION, MANIFEST_FILE, PRECISIONS
from kvasir.model.download.local import find_local
from kvasir.model.download.pull import find
from kvasir.model.download.reference import Reference
from kvasir.model.platform.progress import Progress
from kvasir.model.platform.suggestions import install_command
from kvasir.server.setting_values import split_name
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


@one_line_errors()
def served_directory(
    given: Path, name: str | None, cache_dir: Path | None, precision: str | None = None
) -> Path:
    """Return a model directory as it is, and NAME=DIR for what is exported, once, into the cache.

    That is a model of a store, which is pulled, and a checkpoint, a Hugging Face folder or a GGUF
    file on this machine. precision: None is the default.
    """
    chosen, path = split_name(given)
    reference = Reference.parse(path)
    local = None if reference else find_local(path)
    if reference is None and local is None:
        return given
    default = PRECISIONS["cpu"][0]
    kinds = () if precision in (None, default) else (str(precision),)
    with ProgressBar(takes_minutes=True) as progress:
        cache = cache_dir or user_cache()
        model = find(reference, cache) if reference else local
        assert model is not None
        directory = models_in(cache) / model.key(f"format {FORMAT_VERSION}", *kinds)
        source = directory if directory.is_dir() else model.pull(progress)
        if source == directory:
            with suppress(OSError):  # of a cache that others fill
                os.utime(source)  # kvasir list tells when it was used
    if not (source / MANIFEST_FILE).is_file():
        _export(source, directory, precision or default)
        source = directory
    return Path(f"{chosen or name or model.reference.name}={source}")


def _export(source: Path, directory: Path, precision: str) -> None:
    """Export in a process of its own, so that PyTorch leaves the server's memory."""
    if find_spec("torch") is None:
        raise ValueError(
            f"{source} is a checkpoint, which must be exported once; this needs PyTorch: "
            f"{install_command('train')}; or export it elsewhere, and serve that folder"
        )
    command = [sys.executable, "-m", "kvasir", "export", str(source), "--out", str(directory)]
    command += ["--precision", precision]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # until that export has ended, or was killed
            typer.echo(f"kvasir: waiting for another process that exports to {directory}", err=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return
        typer.echo(f"kvasir: exporting {source} in {precision}, once, to {directory}", err=True)
        for part in directory.parent.glob(f"{escape(directory.name)}.part-*"):
            shutil.rmtree(part)
        # A pipe, since on a terminal the command says what to type next.
        pipe, kept = subprocess.PIPE, (lock.fileno(),)
        with subprocess.Popen(command, stdout=pipe, pass_fds=kept) as process:  # noqa: S603
            try:
                for line in process.stdout or ():
                    typer.echo(line, nl=False, err=True)
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
    if code and not (directory / MANIFEST_FILE).is_file():  # unless another process was faster
        raise typer.Exit(code)
