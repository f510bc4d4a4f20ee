"""A server of a model directory in a process of its own, for a chat or a measurement.

python -m kvasir.server.process.local_server DIRECTORY COMMAND… runs a command meanwhile, with the
server's URL in KVASIR_URL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from kvasir.model.platform.progress import handling


def serve_command(
    directory: Path, *options: str, python: str | Path = sys.executable
) -> list[str | Path]:
    """Return the command that serves a directory on a free loopback port; later options win."""
    serve = [python, "-m", "kvasir", "serve", directory, "--host", "127.0.0.1", "--port", "0"]
    return [*serve, *options]


@contextmanager
def run_server(command: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Run a command that serves, and yield its "ready" log entry with `port`, where it listens.

    Raises ChildProcessError with the last line of its log if it ends before it is ready. Ctrl-C and
    the terminal's end reach this process alone, which ends the server when the block is left.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    environment = {name: value for name, value in os.environ.items() if name != "KVASIR_LOG_FORMAT"}
    with (
        handling(end, signal.SIGTERM, signal.SIGHUP),
        subprocess.Popen(  # noqa: S603
            command, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
        ) as process,
    ):
        log = process.stderr or ()
        reader = Thread(target=deque, args=(log, 0))  # because a full pipe would block the server
        try:
            ready = wait_until_ready(log)
            reader.start()
            yield ready
        finally:
            process.terminate()
            if reader.ident:
                reader.join()


def wait_until_ready(log: Iterable[str]) -> dict[str, Any]:
    """Read a log until the server is ready; raises and returns as `run_server` does."""
    port, line = 0, ""
    for line in log:
        entry: dict[str, Any] = json.loads(line) if line.startswith("{") else {"message": ""}
        if entry["message"] == "listening":
            port = entry["port"]
        if entry["message"] == "ready":
            return entry | {"port": port}
    raise ChildProcessError(line.strip().removeprefix("kvasir: ") or "the server ended at once")


@contextmanager
def serve_locally(
    directory: Path, *options: str, python: str | Path = sys.executable
) -> Iterator[str]:
    """Run `kvasir serve` and yield its URL once it is ready.

    Raises ChildProcessError if it fails to start.
    """
    with run_server(serve_command(directory, *options, python=python)) as ready:
        yield f"http://127.0.0.1:{ready['port']}"


if __name__ == "__main__":
    try:
        with serve_locally(Path(sys.argv[1])) as url:
            environment = os.environ | {"KVASIR_URL": url}
            command = subprocess.run(sys.argv[2:], env=environment, check=False)  # noqa: S603
    except ChildProcessError as error:
        sys.exit(str(error))
    sys.exit(command.returncode)
