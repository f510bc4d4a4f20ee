"""The requests in a batch's file, one a line, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from kvasir.server.batches.objects import Fault

MAX_REQUESTS = 50_000  # of a batch, as OpenAI has it
MOST_BLANK = 2**17  # bytes of blank lines: one with \r\n after each request, and some
PART = 16  # requests that one server of several answers
_MAX_FAULTS = 100  # that are reported
_MAX_ID = 512  # characters of a custom id
_MAX_QUOTED = 100  # characters of an unknown field
_FIELDS = {"custom_id", "method", "url", "body"}

Parse = Callable[[bytes], Any]  # raises ValueError, or an error of the tree


class RequestFile:
    """The lines of a batch's file, which are read anew by each of its iterators.

    Iterators yield None where they have nothing to report, so their reader can pause or stop after
    each line. endpoints: what a request's url may be. parse: reads the JSON of a line of at most
    `max_line` bytes. A custom id is known by its hash, because 50,000 of them would take 100 MB.
    Raises OSError.
    """

    max_requests: float = MAX_REQUESTS
    span: tuple[int, int | None] = 0, None  # of the file, where the lines are

    def __init__(self, path: Path, endpoints: Collection[str], parse: Parse, max_line: int) -> None:
        self._path, self._endpoints = path, endpoints
        self._parse, self._max_line = parse, max_line
        self._at = 0  # where the present line begins
        self.parts: list[int] = []  # where every `PART` requests begin, once `faults` has been read

    def faults(self, seen: set[int]) -> Iterator[Fault | None]:
        """Yield what is wrong with the file, and add the custom ids of its requests to `seen`."""
        n_blank = n_faults = n_requests = 0
        for number, raw in self._lines():
            is_blank = raw.isspace() and len(raw) <= self._max_line
            n_blank += is_blank * len(raw)
            if not is_blank and n_requests % PART == 0:
                self.parts.append(self._at)
            n_requests += not is_blank
            fault = None if is_blank else self._fault(raw, seen)
            if is_over := len(seen) > self.max_requests:
                message = f"A batch may have at most {self.max_requests} requests."
                fault = Fault(code="too_many_requests", message=message)
            elif is_over := n_blank > MOST_BLANK:
                message = f"The file has more than {MOST_BLANK} bytes of blank lines."
                fault = Fault(code="too_many_blank_lines", message=message)
            yield fault and fault.model_copy(update={"line": number})
            n_faults += fault is not None
            if is_over or n_faults == _MAX_FAULTS:
                return
        if not seen and not n_faults:
            yield Fault(code="empty_file", message="The file has no requests.")

    def unanswered(self, answered: set[int]) -> Iterator[tuple[str, str, bytes] | None]:
        """Yield the custom id, the url and the body of each request that is not answered."""
        for _, raw in self._lines():
            line = None if raw.isspace() else self._parse(raw)
            if line is None or hash(line["custom_id"]) in answered:
                yield None
            else:
                yield line["custom_id"], line["url"], json.dumps(line["body"]).encode()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield all lines with their numbers; of one that is too long, the beginning."""
        with self._path.open("rb") as file:
            file.seek(self.span[0])
            for number in count(1):
                self._at = file.tell()
                raw = b"" if self._at == self.span[1] else file.readline(self._max_line + 1)
                if not raw:
                    return
                yield number, raw
                while len(raw) > self._max_line and not raw.endswith(b"\n"):
                    raw = file.readline(self._max_line + 1)

    def _fault(self, raw: bytes, seen: set[int]) -> Fault | None:
        """Return what is wrong with a line; `seen` are the custom ids before it."""
        if len(raw) > self._max_line:
            message = f"This line has more than {self._max_line} bytes."
            return Fault(code="line_too_long", message=message)
        try:
            line = self._parse(raw)
        except Exception as error:
            message = f"This line is not parseable as valid JSON: {error}"
            return Fault(code="invalid_json_line", message=message)
        if not isinstance(line, dict):
            return Fault(code="invalid_json_line", message="This line is not a JSON object.")
        custom_id, body = line.get("custom_id"), line.get("body")
        wrong: tuple[str, str, str] | None = None
        if missing := sorted(_FIELDS - line.keys()):
            wrong = "missing_required_parameter", f"This line lacks {missing[0]}.", missing[0]
        elif unknown := sorted(line.keys() - _FIELDS):
            name = unknown[0][:_MAX_QUOTED]
            wrong = "unknown_parameter", f"This line has the unknown field {name}.", name
        elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID:
            message = f"custom_id must be a string of 1 to {_MAX_ID} characters."
            wrong = "invalid_custom_id", message, "custom_id"
        elif hash(custom_id) in seen:
            message = f"The custom_id {custom_id!r} is used by an earlier line."
            wrong = "duplicate_custom_id", message, "custom_id"
        elif line["method"] != "POST":
            wrong = "invalid_method", "The method must be POST.", "method"
        elif line["url"] not in self._endpoints:
            message = f"The url must be {' or '.join(self._endpoints)}."
            wrong = "mismatched_endpoint", message, "url"
        elif not isinstance(body, dict):
            wrong = "invalid_body", "The body must be a JSON object.", "body"
        elif body.get("stream"):
            wrong = "invalid_body", "Answers of a batch cannot be streamed.", "body.stream"
        if isinstance(custom_id, str):
            seen.add(hash(custom_id))
        return None if wrong is None else Fault(code=wrong[0], message=wrong[1], param=wrong[2])
