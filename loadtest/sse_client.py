"""A lean client of one streamed completion or chat on an OpenAI-compatible server.

The client often shares its processors with the server that it measures, so it opens one connection
a request, parses HTTP in C and creates few objects.
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
class StreamedCompletion:
    """The events of one streamed answer, fed by any reader. Times are seconds of `perf_counter`."""

    sent: float = 0.0
    event_times: list[float] = field(default_factory=list)  # arrivals of events with text
    ended: float = 0.0
    usage: dict[str, Any] | None = None  # the server's token counts, if it sent them
    error: str | None = None  # why the answer is incomplete; the rest describes what came
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse the next bytes of the stream, cut anywhere. An event's data must be on one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if content == b"[DONE]":
                self.ended = now
            elif line.startswith(b"data:"):
                try:
                    self._note(json.loads(content), now)
                except (AttributeError, TypeError, ValueError):
                    self.fail(f"an event is not a completion's: {content[:100]!r}")

    def _note(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            self.fail(error_message(event))
        for choice in event.get("choices", ()):
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self.event_times.append(now)
                break
        if (usage := event.get("usage")) and usage.get("completion_tokens") is not None:
            self.usage = usage

    def finish(self, now: float) -> None:
        """Note the end of the response body, which ends the answer if no [DONE] came."""
        self.ended = self.ended or now
        if not self.event_times:
            self.fail("the answer holds no text")

    def fail(self, error: str) -> None:
        """Note why the answer is incomplete. The first reason is kept."""
        self.error = self.error or error

    @property
    def n_tokens(self) -> int:
        """Generated tokens as the server counted them, or else the number of events with text."""
        return len(self.event_times) if self.usage is None else int(self.usage["completion_tokens"])

    @property
    def ttft(self) -> float:
        """Time to the first event with text."""
        return self.event_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Times between events with text. Events that came in one read make no gap."""
        return [later - earlier for earlier, later in pairwise(self.event_times) if later > earlier]

    @property
    def e2e(self) -> float:
        """Time to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for one token and if all came in one read."""
        if self.n_tokens < 2 or not self.gaps:
            return None
        return (self.e2e - self.ttft) / (self.n_tokens - 1)


def error_message(body: Any) -> str:
    """Return the message of OpenAI's error object or its JSON, or the start of any other body."""
    if isinstance(body, str | bytes):
        try:
            return error_message(json.loads(body))
        except ValueError:
            return (body.decode(errors="replace") if isinstance(body, bytes) else body)[:200]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class Target:
    """The completions endpoint of a server. Raises ValueError for an invalid URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
        self.url, self.host, self.secure = url, parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        root = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._head = (
            f"POST {root}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
        )
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    def request(self, body: bytes) -> bytes:
        """Return the bytes of an HTTP request."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Exchange(asyncio.Protocol):
    """One request, sent as soon as its connection is open, and its response."""

    def __init__(self, request: bytes) -> None:
        self.answer = StreamedCompletion()
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._error_body = b""
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
            self._error_body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}: {error_message(self._error_body)}")
            return
        self.answer.finish(self._now)
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke off{f': {exc}' if exc else ''}")

    def _end(self, error: str | None) -> None:
        if not self.over.done():
            self.over.set_result(error)


async def complete(target: Target, body: bytes, limit: float) -> StreamedCompletion:
    """Request one completion. A failure, or more than `limit` seconds, sets its `error`."""
    exchange = _Exchange(target.request(body))
    transport = None
    try:
        async with asyncio.timeout(limit):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: exchange, target.host, target.port, ssl=target.secure or None
            )
            failure = await exchange.over
    except TimeoutError:
        failure = f"no whole answer within {limit:g} s"
    except OSError as error:
        failure = f"no connection to {target.host}:{target.port}: {error}"
    finally:
        if transport is not None:
            transport.abort()
    if failure:
        exchange.answer.fail(failure)
    return exchange.answer
