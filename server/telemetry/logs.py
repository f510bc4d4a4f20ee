"""The log: JSON lines on standard error, written by a thread of their own, so that nobody waits for who reads them."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from time import sleep

MOST_LINES = 1000  # that wait to be written
_LAST_LINES = 1.0  # seconds for those that wait at the end
_PAUSE = 0.05  # seconds between two batches: a thread that wakes for every line takes the interpreter from streams


class JsonFormatter(logging.Formatter):
    """One JSON object on one line; `extra={"fields": {...}}` adds fields to it."""

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


class PatientHandler(logging.Handler):
    """Writes to a file descriptor, in batches. Lines that come while `MOST_LINES` wait are dropped, and counted.

    A second signal may log while a line is being put: a SimpleQueue is made for that.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._waiting = SimpleQueue[str | Event]()
        self._n_dropped = 0
        Thread(target=self._write, args=(fd,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MOST_LINES:
            self._n_dropped += 1
            return
        if self._n_dropped:
            told = {
                "msg": "dropped lines of the log: they are not read fast enough",
                "levelname": "WARNING",
            }
            self._waiting.put(
                self.format(logging.makeLogRecord(told | {"fields": {"lines": self._n_dropped}}))
            )
            self._n_dropped = 0
        self._waiting.put(self.format(record))

    def flush(self) -> None:
        """Wait until what is there has been written, but not for ever."""
        written = Event()
        self._waiting.put(written)
        written.wait(_LAST_LINES)

    def _write(self, fd: int) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            left = "".join(line + "\n" for line in batch if isinstance(line, str)).encode()
            with suppress(OSError):  # there is nowhere to say so
                while left:
                    left = left[os.write(fd, left) :]
            for item in batch:
                if isinstance(item, Event):
                    item.set()
            sleep(_PAUSE)


def log_to_stderr(level: str) -> logging.Handler:
    """Our lines from `level` on, and everybody's warnings."""
    handler = PatientHandler(sys.stderr.fileno()) if sys.stderr else logging.NullHandler()
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvasir").setLevel(level.upper())
    return handler
