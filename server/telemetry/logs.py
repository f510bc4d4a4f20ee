"""The log: JSON lines on standard error, written by a thread of its own, so no request waits."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from time import sleep

MAX_LINES = 1000  # that wait to be written
_FLUSH_SECONDS = 1.0  # that the end of the process waits for the last lines
_PAUSE = 0.05  # seconds between batches: waking for every line would take the GIL from streams


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra={"fields": {...}}` adds fields to it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class QueuedHandler(logging.Handler):
    """A writer of batches to a file descriptor; lines that come while many wait are dropped."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.setFormatter(_JsonFormatter())
        # It is reentrant: a signal's handler may log while a line is being put.
        self._waiting = SimpleQueue[str | Event]()
        self._n_dropped = 0
        Thread(target=self._write, args=(fd,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, after a warning with the number of dropped lines, if any."""
        if self._waiting.qsize() >= MAX_LINES:
            self._n_dropped += 1
            return
        if self._n_dropped:
            text = "dropped lines of the log: they are not read fast enough"
            warning = logging.LogRecord("kvasir", logging.WARNING, "", 0, text, None, None)
            warning.fields, self._n_dropped = {"lines": self._n_dropped}, 0
            self._waiting.put(self.format(warning))
        self._waiting.put(self.format(record))

    def flush(self) -> None:
        """Wait until all lines so far are written, or for a second."""
        written = Event()
        self._waiting.put(written)
        written.wait(_FLUSH_SECONDS)

    def _write(self, fd: int) -> None:
        while True:
            batch = [self._waiting.get() for _ in range(max(1, self._waiting.qsize()))]
            left = "".join(line + "\n" for line in batch if isinstance(line, str)).encode()
            with suppress(OSError):  # nothing can be logged about the log
                while left:
                    left = left[os.write(fd, left) :]
            for item in batch:
                if isinstance(item, Event):
                    item.set()
            sleep(_PAUSE)


def log_to_stderr(level: str) -> logging.Handler:
    """Log Kvasir's lines from `level` on, and the warnings of all libraries."""
    handler = QueuedHandler(sys.stderr.fileno()) if sys.stderr else logging.NullHandler()
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvasir").setLevel(level.upper())
    return handler
