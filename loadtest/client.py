"""A lean client of a server's completions, chats or embeddings, streamed or in one piece.

The client often shares its processors with the server that it measures, so it keeps connections
open, parses HTTP in C and creates few objects.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from kvasir.model.platform.printable import error_message

COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Answer:
    """The events of one answer, fed by any reader. Times are seconds of `perf_counter`.

    An answer that comes in one piece has no events.
    """

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

    def read_whole(self, body: bytes, now: float) -> None:
        """Parse an answer that came in one piece, which must have the server's token counts."""
        self.ended = now
        try:
            self.usage = dict(json.loads(body)["usage"])
        except (LookupError, TypeError, ValueError):
            self.fail(f"the answer is no JSON with usage: {body[:100]!r}")

    def fail(self, error: str) -> None:
        """Note why the answer is incomplete. The first reason is kept."""
        self.error = self.error or error

    @property
    def n_tokens(self) -> int:
        """Generated tokens as the server counted them, or else the number of events with text."""
        if self.usage is None:
            return len(self.event_times)
        return int(self.usage.get("completion_tokens") or 0)

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


class Target:
    """A server, by its URL. Raises ValueError for an invalid one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
        self.url, self.host, self.secure = url, parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self._root = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._fields = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._fields += f"Authorization: Bearer {api_key}\r\n"

    def request(self, body: bytes, route: str = COMPLETIONS, connection: str = "close") -> bytes:
        """Return the bytes of an HTTP request."""
        head = f"POST {self._root}{route} HTTP/1.1\r\n{self._fields}Connection: {connection}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """A connection, on which one request follows the other."""

    transport: asyncio.WriteTransport
    is_reusable = has_answered = _ends_by_close = False
    _over: asyncio.Future[str | None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    async def exchange(self, request: bytes, answer: Answer) -> str | None:
        """Send a request and feed its answer; return why the answer is incomplete."""
        self._answer, self._body, self._is_whole = answer, b"", False
        self._parser, self._has_length = httptools.HttpResponseParser(self), False
        self.is_reusable = self.has_answered = self._ends_by_close = False
        if self.transport.is_closing():
            return "the connection broke off"
        self._over = asyncio.get_running_loop().create_future()
        answer.sent = perf_counter()
        self.transport.write(request)
        return await self._over

    def data_received(self, data: bytes) -> None:
        self._now, self.has_answered = perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the response is not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_whole = value.startswith(b"application/json")
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._ends_by_close = not self._has_length

    def on_body(self, body: bytes) -> None:
        if self._is_whole or self._parser.get_status_code() != 200:
            self._body += body
        else:
            self._answer.feed(body, self._now)

    def on_message_complete(self) -> None:
        self.is_reusable = self._has_length and self._parser.should_keep_alive()
        if (status := self._parser.get_status_code()) != 200:
            self._end(f"HTTP {status}: {error_message(self._body)}")
            return
        if self._is_whole:
            self._answer.read_whole(self._body, self._now)
        else:
            self._answer.finish(self._now)
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ends_by_close and exc is None:  # RFC 9112, section 6.3
            self.on_message_complete()
        self._end(f"the connection broke off{f': {exc}' if exc else ''}")

    def _end(self, error: str | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(error)


class Client:
    """Requests to a server, over connections that are kept open until `close`.

    limit: seconds for an answer.
    """

    def __init__(self, target: Target, limit: float) -> None:
        self.target, self._limit = target, limit
        self._idle: list[_Connection] = []

    async def ask(
        self, body: bytes, route: str = COMPLETIONS, answer: Answer | None = None
    ) -> Answer:
        """Request one answer. A failure, or more than `limit` seconds, sets its `error`."""
        answer, connection = answer or Answer(), None
        request = self.target.request(body, route, "keep-alive")
        try:
            async with asyncio.timeout(self._limit):
                if self._idle:
                    connection = self._idle.pop()
                    failure = await connection.exchange(request, answer)
                if connection is None or not connection.has_answered:  # the server had closed it
                    connection = await self._open()
                    failure = await connection.exchange(request, answer)
        except TimeoutError:
            failure = f"no whole answer within {self._limit:g} s"
        except OSError as error:
            failure = f"no connection to {self.target.host}:{self.target.port}: {error}"
        finally:
            if connection is not None and connection.is_reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.transport.abort()
        if failure:
            answer.fail(failure)
        return answer

    async def _open(self) -> _Connection:
        loop, target = asyncio.get_running_loop(), self.target
        _, connection = await loop.create_connection(
            _Connection, target.host, target.port, ssl=target.secure or None
        )
        return connection

    def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.transport.abort()


async def complete(target: Target, body: bytes, limit: float) -> Answer:
    """Request one completion over a connection of its own; see `Client.ask`."""
    with closing(Client(target, limit)) as client:
        return await client.ask(body)
