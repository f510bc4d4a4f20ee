"""The log on standard error, written by a thread of its own, so no request waits.

Lines are JSON, or for people: on a terminal, unless a setting says otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from queue import SimpleQueue
from threading import Event, Thread
from time import sleep
from typing import Any, Literal

from kvasir.model.platform.printable import printable

LogFormat = Literal["auto", "text", "json"]

MAX_LINES = 1000  # that wait to be written
_FLUSH_SECONDS = 1.0  # that the end of the process waits for the last lines
_STATUS_STYLES = {2: "green", 3: "green", 4: "yellow", 5: "red"}  # by the first digit
_LEVEL_STYLES = {"warning": "yellow", "error": "red"}
_SHOWN_APART = {"method", "route", "status", "duration_ms", "request_id"}  # of a request
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


class TextFormatter(logging.Formatter):
    """Lines for people: a banner where the server listens, short requests, messages with fields.

    What a client sent cannot control the terminal.
    """

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        level, message = record.levelname.lower(), record.getMessage()
        if message == "listening":
            return self._banner(fields["playground"], fields["models"])
        if message == "request":
            text = self._request(fields)
        elif message == "ready":
            seconds = fields["start_seconds"]["total"]
            model = self._paint(fields["model"], "bold")
            path = fields["kernels"]
            words = [f"{fields['precision']} on {fields['device']}", f"kernels for {path}"]
            text = f"{model} is ready: {', '.join(words[: 1 + bool(path)])}, {seconds:.1f} s"
            if kv := fields.get("kv_cache"):
                size = kv["bytes_per_token"]
                text += f"; memory for {kv['budget_tokens']:,} tokens of {size:,} bytes"
                if state := kv["state_bytes_per_sequence"]:
                    text += f", and {state:,} bytes of states for each sequence"
        else:
            name = "" if level == "info" else self._paint(f"{level}: ", _LEVEL_STYLES.get(level))
            text = "  ".join([name + printable(message, one_line=True), *_words(fields)])
        line = f"{self._paint(self.formatTime(record, '%H:%M:%S'), 'dim')}  {text}"
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join([line, *map(printable, traceback.splitlines())])

    def _banner(self, page: str, models: dict[str, str]) -> str:
        url = page.rstrip("/")
        rows = [("model", f"{name}, {about}") for name, about in models.items()]
        rows += [("page", page), ("API", f"{url}/v1"), ("chat", f"kvasir chat {url}")]
        lines = [f"  {self._paint(f'{name:5}', 'dim')}  {value}" for name, value in rows]
        title = self._paint(f"Kvasir {version('kvasir-lm')}", "bold")
        return "\n".join([title, *lines, "  Ctrl-C ends it"])

    def _request(self, fields: dict[str, Any]) -> str:
        status = fields["status"]
        code = self._paint(str(status), _STATUS_STYLES.get(status // 100))
        words = [f"{code} {fields['method']} {printable(fields['route'], one_line=True)}"]
        rest = {name: value for name, value in fields.items() if name not in _SHOWN_APART}
        duration = f"{fields['duration_ms']:,.0f} ms"
        if "completion_tokens" in rest:
            n_prompt, n_new = rest.pop("prompt_tokens"), rest.pop("completion_tokens")
            reasons = "/".join(map(str, rest.pop("finish_reason")))
            words += [f"{n_prompt:,}+{n_new:,} tokens", reasons]
            if (first := rest.pop("ttft_ms")) is not None:
                duration += f" (first {first:,.0f})"
        return "  ".join([*words, duration, *_words(rest)])

    def _paint(self, text: str, style: str | None) -> str:
        if not (style and self._colours):
            return text
        from rich.color import ColorSystem  # noqa: PLC0415  most servers log JSON
        from rich.style import Style  # noqa: PLC0415

        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def _words(fields: dict[str, Any]) -> list[str]:
    given = (f"{name}={value}" for name, value in fields.items() if value is not None)
    return [printable(word, one_line=True) for word in given]


class QueuedHandler(logging.Handler):
    """A writer of batches to a file descriptor; lines that come while many wait are dropped."""

    def __init__(self, fd: int, formatter: logging.Formatter | None = None) -> None:
        super().__init__()
        self.setFormatter(formatter or _JsonFormatter())
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


def log_to_stderr(level: str, form: LogFormat = "auto") -> logging.Handler:
    """Log Kvasir's lines from `level` on, and the warnings of all libraries."""
    handler: logging.Handler = logging.NullHandler()
    if sys.stderr:
        formatter = None
        if form == "text" or (form == "auto" and sys.stderr.isatty()):
            from rich.console import Console  # noqa: PLC0415  most servers log JSON

            console = Console(stderr=True)
            has_colours = console.color_system is not None and not console.no_color
            formatter = TextFormatter(colours=has_colours)
        handler = QueuedHandler(sys.stderr.fileno(), formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvasir").setLevel(level.upper())
    return handler
