"""The log's thread writes every line in order, and nothing waits for it."""

from __future__ import annotations

import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from threading import Thread
from typing import IO, Any

import pytest

from kvasir.server.telemetry import logs
from kvasir.server.telemetry.logs import MAX_LINES, QueuedHandler, TextFormatter, log_to_stderr


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


def line_for_people(message: str, **fields: Any) -> str:
    record = logging.LogRecord("kvasir", logging.INFO, "", 0, message, None, None)
    record.fields = fields
    return TextFormatter(colours=False).format(record)


def test_people_read_a_request_in_one_short_line() -> None:
    completion = {"prompt_tokens": 1200, "completion_tokens": 16, "finish_reason": ["stop", None]}
    asked = {"request_id": "a" * 32, "method": "POST", "route": "/v1/completions", "status": 200}
    line = line_for_people("request", **asked, duration_ms=1234.5, **completion, ttft_ms=30.2)
    assert "200 POST /v1/completions  1,200+16 tokens  stop/None  1,234 ms (first 30)" in line
    assert "a" * 32 not in line
    assert len(line) <= 100
    failed = asked | {"status": 400, "duration_ms": 1.0, "error": "context_length_exceeded"}
    assert line_for_people("request", **failed).endswith("1 ms  error=context_length_exceeded")


def test_the_banner_names_models_and_addresses() -> None:
    models = {"mine": "int8 on cpu", "other": "bf16 on cuda"}
    page = "http://127.0.0.1:8000/"
    lines = line_for_people("listening", playground=page, models=models).splitlines()
    assert lines[1:3] == ["  model  mine, int8 on cpu", "  model  other, bf16 on cuda"]
    assert lines[3].endswith(page)


def test_clients_cannot_control_the_terminal() -> None:
    asked = {"method": "GET", "route": "/\x1b[2J\n\x9b\u202e", "status": 404, "duration_ms": 1.0}
    for line in (line_for_people("request", **asked), line_for_people("cut off", host="\x1b[0m")):
        assert line.isprintable()


def test_an_exception_follows_its_line() -> None:
    try:
        raise ValueError("which\x1b[2J")
    except ValueError:
        record = logging.LogRecord("kvasir", logging.ERROR, "", 0, "bad", None, sys.exc_info())
    first, *_, last = TextFormatter(colours=False).format(record).splitlines()
    assert (first.endswith("error: bad"), last) == (True, "ValueError: which\u241b[2J")


@pytest.mark.parametrize(
    ("form", "on_terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("text", False, False)],
)
def test_the_log_is_text_on_a_terminal_and_json_elsewhere(
    form: logs.LogFormat, on_terminal: bool, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = pty.openpty() if on_terminal else os.pipe()
    with os.fdopen(read, "rb", 0) as screen, os.fdopen(write, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for module in (logging.root, logging.getLogger("kvasir")):
            monkeypatch.setattr(module, "level", module.level)
        monkeypatch.setattr(logging.root, "handlers", [])
        handler = log_to_stderr("info", form)
        logging.getLogger("kvasir").info("draining", extra={"fields": {"cause": "SIGINT"}})
        handler.flush()
        line = screen.read(4096).decode()
    assert (line.startswith('{"time": '), '"cause": "SIGINT"' in line) == (is_json, is_json)
    assert ("draining  cause=SIGINT" in line) != is_json
