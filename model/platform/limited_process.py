"""Processes for work that the files of others can make expensive: time and memory are limited.

Beyond a limit the process is ended, by a signal, since nothing else stops a call into C or Rust.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any
from weakref import finalize

_ROOT = Path(__file__).parents[3]


class LimitedProcess:
    """A process that runs a module, for use by one thread at a time. Messages are JSON, in lines.

    It ends with this process, when it is closed, or when nothing refers to it.
    """

    def __init__(self, module: str, *messages: object) -> None:
        command = [sys.executable, "-m", module]
        self.process = Popen(command, cwd=_ROOT, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)  # noqa: S603
        self.close = finalize(self, _end, self.process)
        for message in messages:
            self._send(message)

    def ask(self, message: object) -> Any:
        """Return the answer to a message. Raises ChildProcessError if the process ends."""
        self._send(message)
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer.endswith(b"\n"):  # it may be ended while it answers
            self.close()
            raise ChildProcessError("the process was ended")
        return json.loads(answer)

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()


def _end(process: Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# In the process


def messages() -> Iterator[bytes]:
    """Yield the messages to the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server, too
    yield from sys.stdin.buffer


def answer(message: object) -> None:
    """Answer a message."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def limit_memory(n_bytes: int) -> None:
    """Let this process use so much memory in addition; more is a MemoryError, or ends it."""
    n_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    n_bytes += n_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def peak_kib() -> int:
    """Return the most memory that this process has had, in KiB.

    getrusage(2) would count what the process that started this one has, too.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def limit_time(seconds: float) -> None:
    """End this process after so much more CPU time, by a signal; 0 is no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
