"""`kvasir serve` in a process that a fault may end."""

from __future__ import annotations

import subprocess
from collections import deque
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from kvasir.server.process.local_server import serve_command, wait_until_ready
from tests.kit.fake_runner import TIMEOUT

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"
Model = Annotated[Path, typer.Argument(help="Model directory.")]


class ServerProcess:
    """A server that is ready. Its log is read to the end: a full pipe would block it."""

    def __init__(self, port: int = 0, *options: str, directory: Path = EXAMPLE) -> None:
        command = serve_command(directory, "--port", str(port), *options)
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        self._log = self.popen.stderr
        self.port = int(wait_until_ready(self._log)["port"])
        self._reader = Thread(target=deque, args=(self._log, 0))
        self._reader.start()

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        code = self.popen.wait(TIMEOUT)
        self._reader.join()
        self._log.close()
        return code

    def close(self) -> None:
        """Kill what is left of it."""
        self.popen.kill()
        self.wait()
