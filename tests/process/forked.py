"""Processes of `tests.kit.serve_process`, forked from one that has imported what it needs."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.reduction import DupFd
from typing import Any

from tests.kit.serve_process import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class Forked:
    """A process as `subprocess.Popen` has it, with pipes of text."""

    def __init__(self, *arguments: str) -> None:
        (read_in, stdin), (stdout, write_out), (stderr, write_err) = (os.pipe() for _ in range(3))
        ends = [DupFd(end) for end in (read_in, write_out, write_err)]
        self._process = _CONTEXT.Process(target=_run, args=(ends, [*arguments]))
        self._process.start()
        for end in (read_in, write_out, write_err):
            os.close(end)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout, self.stderr = os.fdopen(stdout), os.fdopen(stderr)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def close(self) -> None:
        """Kill the process, if it still runs."""
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr, self.stdin):
            stream.close()


def _run(ends: list[Any], arguments: list[str]) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.detach(), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    sys.exit(main(arguments))
