"""A server of a model directory in a process of its own, for as long as it is measured.

python -m loadtest.local_server DIRECTORY COMMAND… runs a command meanwhile, which finds its URL in KVASIR_URL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any


@contextmanager
def serve_locally(
    directory: Path, *options: str, python: str | Path = sys.executable
) -> Iterator[str]:
    """The URL of `kvasir serve` on a free loopback port, once it is ready. Raises ChildProcessError where it fails."""
    with start_locally(directory, *options, python=python) as ready:
        yield f"http://127.0.0.1:{ready['port']}"


@contextmanager
def start_locally(
    directory: Path, *options: str, python: str | Path = sys.executable
) -> Iterator[dict[str, Any]]:
    """The same, but what the server's log says when it is ready, with its port."""
    serve = ["-m", "kvasir", "serve", str(directory), "--host", "127.0.0.1", "--port", "0"]
    with running([python, *serve, *options]) as ready:
        yield ready


@contextmanager
def running(command: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """The same of a command that serves."""
    ready: Future[dict[str, Any]] = Future()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stderr is not None
        log = Thread(target=_follow, args=(process.stderr, ready))
        log.start()
        try:
            yield ready.result()
        finally:
            process.terminate()
            log.join()


def _follow(log: Iterable[str], ready: Future[dict[str, Any]]) -> None:
    """Read the log to its end, or the server would stand still when the pipe is full."""
    port, line = 0, ""
    for line in log:
        if ready.done() or not line.startswith("{"):
            continue
        entry = json.loads(line)
        if entry["message"] == "listening":
            port = entry["port"]
        elif entry["message"] == "ready":
            ready.set_result(entry | {"port": port})
    if not ready.done():
        ready.set_exception(
            ChildProcessError(line.strip().removeprefix("kvasir: ") or "the server ended at once")
        )


if __name__ == "__main__":
    try:
        with serve_locally(Path(sys.argv[1])) as served_at:
            command = subprocess.run(  # noqa: S603
                sys.argv[2:], env=os.environ | {"KVASIR_URL": served_at}, check=False
            )
    except ChildProcessError as error:
        sys.exit(str(error))
    sys.exit(command.returncode)
