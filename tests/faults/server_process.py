"""`kvasir serve` of the example model in a process of its own, which a fault may end; clients that stream from it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any

from tests.fake_runner import TIMEOUT

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"


def command(directory: Path, port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "kvasir", "serve", str(directory), "--port", str(port), *options]


class ServerProcess:
    """One that is ready. With `follows`, its log is read to the end, or it would stand still when the pipe is full."""

    def __init__(self, port: int, *options: str, follows: bool = True) -> None:
        self.popen = subprocess.Popen(
            command(EXAMPLE, port, *options), stderr=subprocess.PIPE, text=True
        )
        self.port = int(self._until("listening")["port"])
        self._until("ready")
        self.reader = Thread(target=lambda: [None for _ in self.stderr])
        if follows:
            self.reader.start()

    @property
    def stderr(self) -> IO[str]:
        assert self.popen.stderr is not None
        return self.popen.stderr

    def _until(self, message: str) -> dict[str, Any]:
        for text in self.stderr:
            line: dict[str, Any] = json.loads(text)
            if line["message"] == message:
                return line
        raise AssertionError(f"the server ended without saying {message!r}")


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
    """A streamed completion on a connection of its own. `begun` is set by its first bytes, or its end."""

    def __init__(self, port: int, **fields: Any) -> None:
        body = json.dumps(
            {"prompt": "def read", "stream": True, "ignore_eos": True} | fields
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self.begun = asyncio.Event()
        self.text = b""
        self._port, self._request = port, head.encode() + body

    async def run(self) -> str:
        """How it ended: `whole`, `refused`, `cut`, or `hangs`."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._read()
        except TimeoutError:
            return "hangs"
        except OSError:  # refused, or reset
            pass
        finally:
            self.begun.set()
        if self.text.startswith(b"HTTP/1.1 200") and self.text.endswith(
            b"data: [DONE]\n\n\r\n0\r\n\r\n"
        ):
            return "whole"
        return (
            "refused"
            if not self.text or self.text.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429"))
            else "cut"
        )

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._request)
            while piece := await reader.read(2**16):
                self.text += piece
                self.begun.set()
        finally:
            writer.close()
