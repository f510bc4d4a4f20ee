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
from threading import Thread, current_thread, main_thread
from typing import Any


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
    environment = {name: value for name, value in os.environ.items() if name != "KVASIR_LOG_FORMAT"}
    with (
        _exit_on_signals(),
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


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Leave the block by SystemExit on SIGTERM and SIGHUP, unless this process ignores them.

    Only the main thread can handle signals; in another one this does nothing.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = {}
    if current_thread() is main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
