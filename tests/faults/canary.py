"""An ordinary client beside a fault: the longest stalls of its stream, and the server's memory.

python -m tests.faults.canary PORT TOKENS KEY streams until standard input ends, and then prints
what came. It is a process of its own, so the attackers' work does not delay it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from loadtest.sse_client import StreamedCompletion, Target
from tests.faults.report import Report

_PAUSE = 0.05  # seconds after a request that was refused


@contextmanager
def canary(
    report: Report, port: int, *, tokens: int, key: str | None = None, pid: int | None = None
) -> Iterator[None]:
    """Stream within the block, and add the gaps between tokens and the memory to the report.

    pid: of the server; by default it is in this process.
    """
    pid = pid or os.getpid()
    _attackers().submit(int).result()  # they start before, so that this delays no stream
    command = [sys.executable, "-m", __name__, str(port), str(tokens), *([key] if key else ())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its first token has come
        before = reset_peak(pid)
        try:
            yield
            report.grown = max(report.grown or 0, memory(pid, "VmHWM") - before)
        finally:
            printed, _ = process.communicate()
    came = json.loads(printed)
    report.gaps += came["gaps"]
    report.lost += [f"the canary: {error}" for error in came["errors"]]


def reset_peak(pid: int) -> int:
    """Let the peak of a process's memory begin anew, and return the memory in use."""
    if pid == os.getpid():
        ctypes.CDLL(None).malloc_trim(0)  # else a request may use what others have left
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


def memory(pid: int, name: str) -> int:
    """Return a figure of a process's memory in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def apart(
    report: Report, attack: Callable[..., Coroutine[Any, Any, None]], *arguments: object
) -> None:
    """Run an attack in another process, so that attackers and server share no interpreter."""
    told = _attackers().submit(_run, report, attack, *arguments).result()
    report.tried, report.lost, report.note = told.tried, told.lost, told.note


def _run(
    report: Report, attack: Callable[..., Coroutine[Any, Any, None]], *arguments: object
) -> Report:
    asyncio.run(attack(report, *arguments))
    return report


@cache
def _attackers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


class _Canary:
    def __init__(self, target: Target, tokens: int) -> None:
        fields = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        always_text = {"temperature": 0, "logit_bias": {"66": 100}}  # in every event
        body = json.dumps(fields | always_text).encode()
        self._target, self._request = target, target.request(body)
        self.gaps: list[float] = []
        self.errors: list[str] = []
        self.has_begun = False

    async def stream(self) -> None:
        """Stream again and again. The time since the last token is a gap too."""
        while True:
            answer = StreamedCompletion()
            try:
                await self._read(answer)
            except OSError as error:
                answer.fail(repr(error))
            finally:
                if answer.event_times:
                    self.gaps += answer.gaps
                    if not answer.ended:
                        self.gaps.append(perf_counter() - answer.event_times[-1])
            if not answer.event_times:
                await asyncio.sleep(_PAUSE)
            elif not answer.ended:
                self.errors.append(f"its stream broke off: {answer.error}")

    async def _read(self, answer: StreamedCompletion) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            writer.write(self._request)
            while piece := await reader.read(2**16):
                answer.feed(piece, perf_counter())
                if answer.event_times and not self.has_begun:
                    self.has_begun = True
                    sys.stdout.write("\n")
                    sys.stdout.flush()
        finally:
            writer.close()


async def _main(port: str, tokens: str, *key: str) -> None:
    one = _Canary(Target(f"http://127.0.0.1:{port}", *key), int(tokens))
    streaming = asyncio.create_task(one.stream())
    await asyncio.to_thread(sys.stdin.read)
    streaming.cancel()
    with suppress(asyncio.CancelledError):
        await streaming
    sys.stdout.write(json.dumps({"gaps": one.gaps, "errors": one.errors}))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
