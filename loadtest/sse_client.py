"""One streamed completion, or chat, of an OpenAI-compatible server: when its text came, and how many tokens it was.

`Answer` is fed bytes and the time, whoever reads the socket; `complete` reads one with asyncio. It is lean, because it
often shares its processors with the server that it measures: a connection a request, a C parser for HTTP, few objects.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import httptools


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are perf_counter's seconds.

    event_times: of the events that held text. ended: when the whole answer was there. usage: as the server counted, if
    it did. error: why there is no whole answer; whatever else is known then describes the part that came.
    """

    sent: float = 0.0
    event_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: dict[str, Any] | None = None
    error: str | None = None
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """The next bytes of the stream, cut anywhere. Servers write the data of an event on one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.ended = now
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self.fail(error_message(event))
            if any(map(_text, event.get("choices", ()))):
                self.event_times.append(now)
            if (usage := event.get("usage")) and usage.get("completion_tokens") is not None:
                self.usage = usage
        except (AttributeError, TypeError, ValueError):
            self.fail(f"an event is not a completion's: {data[:100]!r}")

    def finish(self, now: float) -> None:
        """The body's end, which is also the answer's where the server says no [DONE]."""
        self.ended = self.ended or now
        if not self.event_times:
            self.fail("the answer holds no text")

    def fail(self, error: str) -> None:
        self.error = self.error or error

    @property
    def n_tokens(self) -> int:
        """As the server counted them; without its count, a token is an event."""
        return len(self.event_times) if self.usage is None else int(self.usage["completion_tokens"])

    @property
    def n_prompt_tokens(self) -> int | None:
        return None if self.usage is None else self.usage.get("prompt_tokens")

    @property
    def ttft(self) -> float:
        return self.event_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between events with text; those that one read brought together have come at once, and make none."""
        return [later - earlier for earlier, later in pairwise(self.event_times) if later > earlier]

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """None for a single token, and where all came at once."""
        return (
            (self.e2e - self.ttft) / (self.n_tokens - 1)
            if self.n_tokens > 1 and self.gaps
            else None
        )


def _text(choice: dict[str, Any]) -> Any:
    """What a choice of a completion's event says, or of a chat's."""
    return choice.get("text") or (choice.get("delta") or {}).get("content")


def error_message(body: Any) -> str:
    """From OpenAI's error body, or from whatever came instead."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


@dataclass(frozen=True, slots=True)
class Target:
    """Where completions are asked for. Raises ValueError for a URL that is not one."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not a URL such as http://localhost:8000")

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether to speak TLS."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        return parts.hostname or "", parts.port or (443 if secure else 80), secure

    def request(self, body: bytes) -> bytes:
        parts = urlsplit(self.url)
        path = (
            parts.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
            + "/v1/completions"
        )
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Exchange(asyncio.Protocol):
    """One request, sent as soon as its connection stands, and its response."""

    def __init__(self, request: bytes) -> None:
        self.answer = Answer()
        self.over = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._refusal = b""
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.answer.sent = perf_counter()
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the response is not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self.answer.feed(body, self._now)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 200:
            self.answer.finish(self._now)
            self._end()
            return
        try:
            said = error_message(json.loads(self._refusal))
        except ValueError:
            said = self._refusal[:200].decode(errors="replace")
        self._end(f"HTTP {status}: {said}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke off{f': {exc}' if exc else ''}")

    def _end(self, error: str | None = None) -> None:
        if not self.over.done():
            self.over.set_result(None)
            if error is not None:
                self.answer.fail(error)


async def complete(target: Target, body: bytes, limit: float) -> Answer:
    """Ask for one completion. Whatever goes wrong, or takes longer than `limit` seconds, is the answer's error."""
    host, port, secure = target.address
    exchange = _Exchange(target.request(body))
    transport = None
    try:
        async with asyncio.timeout(limit):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(
                lambda: exchange, host, port, ssl=secure or None
            )
            await exchange.over
    except TimeoutError:
        exchange.answer.fail(f"no whole answer within {limit:g} s")
    except OSError as error:
        exchange.answer.fail(f"no connection to {host}:{port}: {error}")
    finally:
        if transport is not None:
            transport.abort()
    return exchange.answer
