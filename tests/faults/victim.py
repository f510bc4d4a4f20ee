"""`kvasir serve` of any checkout under attack: every wait has a limit, and its log is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any
from urllib.request import urlopen

import psutil

from tests.faults.damage import with_file
from tests.kit.serving import CHAT_TEMPLATE

MEMORY = 2**30  # bytes that the server and its children may use
DRAIN = 2.0
KEY, OTHER_KEY, STREAM_KEY, SPY_KEY, GREEDY_KEY = "a-key", "b-key", "c-key", "spy-key", "greedy-key"
QUOTA = 300  # tokens a minute of the greedy key
_KEYS = (
    f"name=a {KEY}\nname=b {OTHER_KEY}\nname=c {STREAM_KEY}\nname=spy {SPY_KEY}\n"
    f"name=greedy tokens_per_minute={QUOTA} {GREEDY_KEY}\n"
)
_OPTIONS = ("--kv-cache-memory", "64MiB", "--prefix-cache-memory", "8MiB", "--port", "0")
_GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
_START_SECONDS = 120.0
_KILL_SECONDS = 30.0  # beyond the drain


class Victim:
    """A server in a process of its own, and its children.

    folder: for its batches. errors: lines of its log that tell of a fault of its own.
    limited: whether the system holds the process to MEMORY.
    """

    def __init__(
        self, checkout: Path, folder: Path, options: tuple[str, ...], n_files: int | None
    ) -> None:
        (folder / "keys").write_text(_KEYS)
        model = with_file(folder / "model", "chat_template.jinja", CHAT_TEMPLATE.encode())
        python = checkout / ".venv/bin/python"
        command = [python if python.exists() else sys.executable, "-m", "kvasir", "serve"]
        command += [f"fake-model={model}", *_OPTIONS, "--drain-timeout", str(DRAIN), *options]
        if "--allowed-hosts" not in options:
            command += ["--api-key-file", str(folder / "keys")]
        command += ["--batch-dir", str(folder / "batches")]
        if n_files:
            command = ["sh", "-c", f'ulimit -n {n_files}; exec "$@"', "sh", *command]
        known = {name: value for name, value in os.environ.items() if "KVASIR_" not in name}
        self.folder, self.errors, self.port = folder, list[str](), 0
        self._started = perf_counter()
        self.popen = subprocess.Popen(
            command, cwd=checkout, env=known, stderr=subprocess.PIPE, text=True
        )
        self._group = _limit(self.popen.pid)
        self.limited = self._group is not None
        self._listens, self.start_seconds, self._last = Event(), 0.0, ""
        self._reader = Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Raise ChildProcessError if the server does not begin to serve in time."""
        until = self._started + _START_SECONDS
        self._listens.wait(_START_SECONDS)
        while not self._has_loaded():
            if perf_counter() > until or self.popen.poll() is not None:
                raise ChildProcessError(f"the server did not start: {self._last[-200:]}")
            sleep(0.05)
        self.start_seconds = perf_counter() - self._started
        self.errors.clear()  # a model that is refused is one

    def _has_loaded(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health/startup"
        with suppress(OSError), urlopen(url, timeout=_START_SECONDS) as answer:
            return bool(answer.status == 200)
        return False

    def _read_log(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            entry: dict[str, Any] = json.loads(line) if line[0] == "{" else {"message": line}
            if entry["message"] == "listening":
                self.port = entry["port"]
                self._listens.set()
            elif self._tells_of_a_fault(entry):
                self.errors.append(f"the log says: {line.strip()[-600:]}")
            self._last = line
        self._listens.set()

    def _tells_of_a_fault(self, entry: dict[str, Any]) -> bool:
        """Return whether an entry does, and not of clients that do not read at the end."""
        message = entry["message"]
        is_error = entry.get("level") == "error" and not message.startswith("Cancel ")
        return is_error or "exception" in entry or "Traceback" in message

    def memory(self, name: str) -> int:
        """Return a figure in bytes of all its processes; 0 if it has ended."""
        return sum(figure(pid, name) for pid in self._pids())

    def reset_peak(self) -> int:
        """Let the peak of its memory begin anew, and return the memory in use."""
        for pid in self._pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return self.memory("VmRSS")

    def _pids(self) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.popen.pid).children(recursive=True)
            return [self.popen.pid, *(one.pid for one in family)]
        return []

    def end(self) -> str:
        """Send SIGTERM, and return the seconds until its end, or say that it had to be killed."""
        started = perf_counter()
        self.popen.send_signal(signal.SIGTERM)
        try:
            code = self.popen.wait(DRAIN + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"> {DRAIN + _KILL_SECONDS:.0f}"
        return f"{perf_counter() - started:.1f}" + (f" (exit code {code})" if code else "")

    def close(self) -> None:
        """Kill what is left of it."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join(_KILL_SECONDS)
        if self.popen.stderr is not None:
            self.popen.stderr.close()
        if self._group is not None:
            with suppress(OSError):
                self._group.rmdir()


@contextmanager
def attacked(
    checkout: Path, folder: Path, options: tuple[str, ...] = (), n_files: int | None = None
) -> Iterator[Victim]:
    """Serve the example of a checkout. Raises ChildProcessError if it does not start."""
    server = Victim(checkout, folder, options, n_files)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def _limit(pid: int) -> Path | None:
    """Hold a process to MEMORY, and return its control group; None where this is not allowed."""
    for root, name in _GROUPS:
        group = Path(root) / f"kvasir-attack-{pid}"
        with suppress(OSError):
            group.mkdir()
            if (group / name).exists():
                (group / name).write_text(str(MEMORY))
                (group / "cgroup.procs").write_text(str(pid))
                return group
        with suppress(OSError):
            group.rmdir()
    return None


def figure(pid: int, name: str) -> int:
    """Return a figure of a process's memory in bytes."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    return 0
