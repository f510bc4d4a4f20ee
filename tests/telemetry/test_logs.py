"""The log's thread writes every line in order, and nothing waits for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from threading import Thread
from typing import IO, Any

import pytest

from server.telemetry import logs
from server.telemetry.logs import MAX_LINES, QueuedHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """A pipe: the descriptor to write to, and the file to read from."""
    read, write = os.pipe()
    with os.fdopen(read) as file:
        yield write, file


@pytest.fixture
def log(pipe: tuple[int, IO[str]]) -> logging.Logger:
    """A logger that writes to the pipe."""
    logger = logging.Logger("own")
    logger.addHandler(QueuedHandler(pipe[0]))
    return logger


def test_every_line_is_written_in_order(log: logging.Logger, pipe: tuple[int, IO[str]]) -> None:
    try:
        raise ValueError("which")
    except ValueError:
        log.exception("line %d\n%s", 0, "ä")
    for i in range(1, 100):
        log.info("line", extra={"fields": {"i": i}})
    lines = [json.loads(pipe[1].readline()) for _ in range(100)]
    assert (lines[0]["level"], lines[0]["message"]) == ("error", "line 0\nä")
    assert lines[0]["exception"].endswith("ValueError: which")
    assert [line["i"] for line in lines[1:]] == list(range(1, 100))


def test_logging_does_not_wait_for_a_slow_reader(
    log: logging.Logger, pipe: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning counts the dropped lines once there is room; the others are complete."""
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 0.01)
    n = 3 * MAX_LINES
    for i in range(n):
        log.info("x" * 500, extra={"fields": {"i": i}})
    log.handlers[0].flush()
    lines: list[dict[str, Any]] = []

    def read() -> None:
        for text in pipe[1]:
            lines.append(json.loads(text))
            if lines[-1]["message"] == "end":
                return

    reader = Thread(target=read)
    reader.start()
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 60.0)
    log.handlers[0].flush()
    log.info("end")
    reader.join()
    kept = [line["i"] for line in lines if "i" in line]
    assert kept[:MAX_LINES] == list(range(MAX_LINES))
    assert kept == sorted(kept)
    assert sum(line["lines"] for line in lines if line["level"] == "warning") == n - len(kept) > 0


def test_lines_that_cannot_be_written_are_ignored(
    log: logging.Logger, pipe: tuple[int, IO[str]]
) -> None:
    pipe[1].close()
    for _ in range(10):
        log.info("x")
        log.handlers[0].flush()
