"""Limits that uvicorn lacks: on heads, slow senders and readers, connections, unfinished bodies."""

from __future__ import annotations

import asyncio
import logging
import resource
from time import monotonic
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.api.http.middleware import PROBED_PATHS, UPLOAD_PATH, log_request, new_state
from server.api.http.responses import error_response
from server.errors import HeadTooLargeError, InvalidRequestError, KvasirError, UnavailableError
from server.settings import Settings

logger = logging.getLogger("kvasir")

MAX_HEADERS = 128
MIN_BODY_RATE = 500  # bytes a second, as a mean over `receive_timeout`
_RESERVED_FILES = 64  # open files beside connections, and newcomers until they are turned away
_RESERVED_CONNECTIONS = 16  # connections left to probes; with few connections a quarter of them
_LOG_INTERVAL = 10.0  # seconds between two log lines on too many connections
_SLICE = 4096  # bytes: the parser holds an unfinished header of at most this length unseen
_LINGER = 2  # seconds in which a client that is still sending can read why it was refused


def max_connections() -> int:
    """Return how many connections fit into the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(soft - _RESERVED_FILES, soft // 2)


class SharedLimits:
    """Limits on all connections together: on their number, and on the bytes of unfinished bodies.

    A newcomer beyond `most` ends the one that has waited longest. A few connections are left to
    newcomers, for probes: beyond them a complete request is refused.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._most_busy = most - min(_RESERVED_CONNECTIONS, most // 4)
        # Those without a complete request, except probes; the one that has waited longest first.
        self._waiting: dict[BoundedConnection, None] = {}
        self._busy = set[BoundedConnection]()
        # Bytes of unfinished bodies; the one that began first is the first.
        self._held: dict[BoundedConnection, int] = {}
        self._n_held = self._n_aborted = 0
        self._logged_at = -_LOG_INTERVAL

    def add(self, newcomer: BoundedConnection, n_connections: int) -> None:
        """Take in a connection; `n_connections` counts it."""
        self.wait(newcomer)
        if n_connections <= self._most:
            return
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.transport.abort()
        self._n_aborted += 1
        if monotonic() - self._logged_at >= _LOG_INTERVAL:
            fields = {"most": self._most, "cut_off": self._n_aborted}
            message = "more connections than open files allow: cut off those that waited longest"
            logger.warning(message, extra={"fields": fields})
            self._logged_at, self._n_aborted = monotonic(), 0

    def wait(self, connection: BoundedConnection) -> None:
        """Note that a connection waits for a request, or for the rest of one."""
        self._busy.discard(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def begin(self, connection: BoundedConnection) -> bool:
        """Note that a connection has a complete request; return whether there is room for it."""
        if connection not in self._busy and len(self._busy) >= self._most_busy:
            return False
        self._waiting.pop(connection, None)
        self._busy.add(connection)
        return True

    def hold(self, connection: BoundedConnection, n_bytes: int) -> None:
        """Count bytes of an unfinished body; beyond `most_bytes` refuse the one begun first."""
        self._held[connection] = self._held.get(connection, 0) + n_bytes
        self._n_held += n_bytes
        while self._n_held > self._most_bytes:
            message = f"unfinished bodies exceed {self._most_bytes} bytes; send this one again"
            next(iter(self._held)).refuse(UnavailableError(message, retry_after=1))

    def release(self, connection: BoundedConnection) -> None:
        """Forget the bytes of a body."""
        self._n_held -= self._held.pop(connection, 0)

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a connection."""
        self.release(connection)
        self._waiting.pop(connection, None)
        self._busy.discard(connection)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, with limits.

    A request must arrive within `receive_timeout` of its first byte, or its body at
    `MIN_BODY_RATE`. No such clock runs while an answer is made. A client that does not read is cut
    off after `send_timeout`. A complete answer may be read slowly, as long as it is read: its
    request holds no slot any more.
    """

    fastapi: FastAPI
    settings: Settings
    shared: SharedLimits
    url = b""
    # The last request whose answer was begun: `cycle`, unless the client has sent others early.
    _answering: RequestResponseCycle | None = None
    _incoming: RequestResponseCycle | None = None  # the request whose body is being received
    _n_body = 0  # bytes of a body since the receive timer was started
    _n_overhead = 0  # bytes of a head, or around a body, since the parser last reported progress
    _is_refused = False
    _receive_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client `receive_timeout` for its first byte."""
        super().connection_made(transport)
        self._close_if_idle_for(self.settings.receive_timeout)
        self.shared.add(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Parse in slices, so that what is neither a complete header nor body stays bounded."""
        for start in range(0, len(data), _SLICE):
            if self._is_refused:
                return
            self._start_receive_timer()
            piece = data[start : start + _SLICE]
            self._n_overhead += len(piece)
            super().data_received(piece)
            if self._n_overhead > self.settings.max_header_bytes + _SLICE:
                self._refuse_head()

    def on_message_begin(self) -> None:
        """Start the clock of a request."""
        super().on_message_begin()
        self._n_overhead = 0
        self._start_receive_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but no trailer: uvicorn would add it to the headers."""
        if self._incoming is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Refuse a large head, or let uvicorn start the request."""
        n_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if n_bytes > self.settings.max_header_bytes or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            self._stop_if_refused()
        super().on_headers_complete()
        if self.parser.should_upgrade():  # answered in HTTP/1.1; what follows cannot be parsed
            self.cycle.keep_alive = False
        if self.parser.get_http_version() < "1.1":
            _end_by_close(self.cycle)
        if self._unanswered is None:
            self._answering = self.cycle
            self.shared.wait(self)
        self._incoming, self._n_overhead = self.cycle, 0

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        super().on_body(body)
        self._n_body += len(body)
        self._n_overhead = 0
        if not self.cycle.response_complete and self._path != UPLOAD_PATH:
            self.shared.hold(self, len(body))
            self._stop_if_refused()

    def on_message_complete(self) -> None:
        """Stop the clock of a request, and refuse it if too many others are being answered."""
        super().on_message_complete()
        self._incoming, self._n_overhead = None, 0
        self._stop_receive_timer()
        self.shared.release(self)
        if self.cycle.response_complete:  # data that came since has stopped uvicorn's timer
            self._close_if_idle_for(self.timeout_keep_alive)
        elif self._path not in PROBED_PATHS and not self.shared.begin(self):
            message = "too many connections have a request; try again"
            self.refuse(UnavailableError(message, retry_after=1))
            self._stop_if_refused()

    def _stop_if_refused(self) -> None:
        if self._is_refused:
            raise ValueError  # stops the parser

    def _close_if_idle_for(self, seconds: float) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(seconds, handler)

    def _start_receive_timer(self) -> None:
        if self._receive_timer is None:
            self._n_body = 0
            seconds = self.settings.receive_timeout
            self._receive_timer = self.loop.call_later(seconds, self._check_received)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _check_received(self) -> None:
        self._receive_timer = None
        is_pipelined = self._unanswered not in (None, self._incoming)
        is_wanted = self._incoming is not None and not self._incoming.response_complete
        is_fast = self._n_body >= MIN_BODY_RATE * self.settings.receive_timeout
        if self.flow.read_paused or is_pipelined or (is_wanted and is_fast):
            self._start_receive_timer()
        else:
            self.cut_off("cut off a client that sends too slowly")

    def refuse_unfinished(self) -> None:
        """Answer 503 to a request that will not be complete before the server is down."""
        if self._receive_timer is not None and self._unanswered is self._incoming:
            self.refuse(UnavailableError("the server is shutting down; try again", retry_after=1))

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP as the API answers errors."""
        self.refuse(InvalidRequestError(msg))

    def _refuse_head(self) -> None:
        message = (
            "the request's URL and headers, or its trailers, have more than "
            f"{self.settings.max_header_bytes} bytes, or there are more than {MAX_HEADERS} "
            "headers; send less"
        )
        self.refuse(HeadTooLargeError(message))

    def refuse(self, error: KvasirError) -> None:
        """Answer with an error unless another answer has begun, disconnect that one, then close.

        The connection lingers, so that a client that is still sending reads the answer.
        """
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_receive_timer()
        self.shared.release(self)
        self._disconnect_unanswered()
        if self._unanswered is not None and self._unanswered.response_started:
            self.transport.close()
            return
        if self._incoming is None or not self._incoming.response_complete:
            self.transport.write(self._refusal(error))
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER, self.transport.close)

    def _refusal(self, error: KvasirError) -> bytes:
        state = new_state(Headers(raw=self.headers or []).get("x-request-id"))
        scope: Scope = {
            "type": "http",
            "app": self.fastapi,
            "method": None,
            "path": self._path[:200],
            "headers": self.headers or [],
            "state": {"request": state},
        }
        response = error_response(scope, error)
        log_request(scope, response.status_code, 0.0)
        response.headers.update({"x-request-id": state.id, "connection": "close"})
        headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        return STATUS_LINE[response.status_code] + headers + b"\r\n" + bytes(response.body)

    def on_response_complete(self) -> None:
        """Note which request is answered next, if any."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        else:
            self.shared.release(self)
        super().on_response_complete()
        if self._unanswered in (None, self._incoming):
            self.shared.wait(self)

    def pause_writing(self) -> None:
        """Start the clock of a client that does not read."""
        super().pause_writing()
        seconds, n_left = self.settings.send_timeout, self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(seconds, self._check_sent, n_left)

    def resume_writing(self) -> None:
        """Stop the clock of a client that reads again."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application, and stop all clocks."""
        self.shared.remove(self)
        self.resume_writing()
        self._stop_receive_timer()
        self._disconnect_unanswered()
        super().connection_lost(exc)

    @property
    def _path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    @property
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request whose answer is being made."""
        cycle = self._answering
        return None if cycle is None or cycle.response_complete else cycle

    def _disconnect_unanswered(self) -> None:
        if self._unanswered is not None:
            self._unanswered.disconnected = True
            self._unanswered.message_event.set()

    def cut_off(self, reason: str = "cut off a client that does not read") -> None:
        """End the connection at once, and log why."""
        logger.warning(reason)
        self.transport.abort()

    def _check_sent(self, n_left: int) -> None:
        if self._unanswered is None and self.transport.get_write_buffer_size() < n_left:
            self.pause_writing()
        else:
            self.cut_off()


def _end_by_close(cycle: RequestResponseCycle) -> None:
    """Send an answer as HTTP/1.0 knows it: without chunks, and ended by the connection's close."""
    send = cycle.send

    async def send_unframed(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]
    cycle.chunked_encoding = cycle.keep_alive = cycle.waiting_for_100_continue = False
