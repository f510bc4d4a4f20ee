"""A process that answers each line on its standard input with a line, unless it hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from select import select
from types import TracebackType
from typing import Any, Self


class Child:
    """A module of Python that runs as a process of its own."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, request: Any, seconds: float) -> Any:
        """Send a line, and return its answer. Raises as `hear` does."""
        self.tell(request)
        return self.hear(seconds)

    def tell(self, request: Any) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(request).encode() + b"\n")
        self._popen.stdin.flush()

    def hear(self, seconds: float) -> Any:
        """Return its next line's JSON. Raises TimeoutError if none comes in time."""
        assert self._popen.stdout is not None
        if not select([self._popen.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        line = self._popen.stdout.readline()
        if not line:
            raise ChildProcessError(f"it ended with {self._popen.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self._popen.kill()
        self._popen.communicate()
