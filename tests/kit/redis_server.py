"""A real redis-server on a free port, which tests stop and start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvasir.server.process.serve import bind

COMMAND = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    COMMAND is None and "CI" not in os.environ, reason="redis-server is not installed"
)


class RedisServer:
    """A server whose data outlive a stop."""

    def __init__(self, folder: Path) -> None:
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        listener.close()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder

    def start(self) -> None:
        """Return once it accepts connections."""
        assert COMMAND is not None, "redis-server is not installed: apt-get install redis-server"
        options = ["--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        self._process = subprocess.Popen(
            [COMMAND, *options, "--appendonly", "yes"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert any("Ready to accept" in line for line in self._process.stdout)

    def stop(self) -> None:
        """End it, if it runs."""
        self._process.kill()
        self._process.communicate()

    def pause(self, *, paused: bool) -> None:
        """Keep it from replying, with its connections open."""
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Run a server with its data in a folder."""
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
