"""`kvasir serve` in a process that a fault may end, and clients that stream from it."""

from __future__ import annotations

import asyncio
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any

from kvasir.server.process.local_server import serve_command, wait_until_ready
from tests.fake_runner import TIMEOUT
from tests.faults.client import post
from tests.faults.probe import EXAMPLE


class ServerProcess:
    """A server that is ready.

    With `follows`, its log is read to the end, because a full pipe would block the server.
    """

    def __init__(
        self, port: int, *options: str, follows: bool = True, directory: Path = EXAMPLE
    ) -> None:
        command = serve_command(directory, "--port", str(port), *options)
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = int(wait_until_ready(self.stderr)["port"])
        self.reader = Thread(target=deque, args=(self.stderr, 0))
        if follows:
            self.reader.start()

    @property
    def stderr(self) -> IO[str]:
        assert self.popen.stderr is not None
        return self.popen.stderr


@contextmanager
def serving_example(port: int = 0, *options: str, follows: bool = True) -> Iterator[ServerProcess]:
    process = ServerProcess(port, *options, follows=follows)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait(TIMEOUT)
        if follows:
            process.reader.join()
        process.stderr.close()


class Stream:
    """A streamed completion on a connection of its own.

    begun: set by its first bytes, or its end.
    """

    def __init__(self, port: int, **fields: Any) -> None:
        fields = {"prompt": "def read", "stream": True, "ignore_eos": True} | fields
        self.begun = asyncio.Event()
        self.text = b""
        self._port = port
        self._request = post("/v1/completions", fields)

    async def read(self) -> str:
        """Read to the end and return how it came: `whole`, `refused`, `cut`, or `hangs`."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._read()
        except TimeoutError:
            return "hangs"
        except OSError:  # refused, or reset
            pass
        finally:
            self.begun.set()
        if not self.text or self.text.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")):
            return "refused"
        end = b"data: [DONE]\n\n\r\n0\r\n\r\n"
        is_whole = self.text.startswith(b"HTTP/1.1 200") and self.text.endswith(end)
        return "whole" if is_whole else "cut"

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._request)
            while piece := await reader.read(2**16):
                self.text += piece
                self.begun.set()
        finally:
            writer.close()
