"""Limits that uvicorn lacks: on heads, slow senders and readers, and what they make it hold."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvasir.server.api.http.middleware import HEALTH_PATHS, PROBED_PATHS, UPLOAD_PATH
from kvasir.server.api.http.responses import path_of
from kvasir.server.errors import (
    HeadTooLargeError,
    InvalidRequestError,
    KvasirError,
    UnavailableError,
)
from kvasir.server.process.shared_limits import SharedLimits
from kvasir.server.process.transport import (
    AnswerTransport,
    Reader,
    end_by_close,
    refusal,
    without_offer,
)

logger = logging.getLogger("kvasir")

MAX_HEADERS, MAX_HEAD_BYTES = 128, 2**15  # of a request's URL and headers, or its trailers
RECEIVE_TIMEOUT = 30.0  # seconds
MIN_BODY_RATE = 500  # bytes a second, as a mean over RECEIVE_TIMEOUT
MAX_PIPELINED = 16  # requests that a client may send before it has the answer to another
_SLICE = 4096  # bytes: the parser holds an unfinished header of at most this length unseen
_UNREAD = 2**14  # bytes that wait in a connection before its client counts as one that stalls
_PROBE_INTERVAL = 0.2  # seconds between writes to a client that has ended its side
_LINGER = 2  # seconds in which a client that is still sending can read why it was refused


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, with limits.

    A request must arrive within `RECEIVE_TIMEOUT` of its first byte, or its body at
    `MIN_BODY_RATE`. No such clock runs while an answer is made. A client that does not read is cut
    off after `send_timeout`. A complete answer may be read slowly, as long as it is read: its
    request holds no slot any more. The next request begins once it has been read.
    """

    fastapi: FastAPI
    send_timeout: float  # seconds
    shared: SharedLimits
    url = b""
    # The last request whose answer was begun: `cycle`, unless the client has sent others early.
    _answering: RequestResponseCycle | None = None
    _incoming: RequestResponseCycle | None = None  # the request whose body is being received
    _n_body = 0  # bytes of a body since the receive timer was started
    _declined = b""  # the head of a request that offers another protocol, without the offer
    _n_overhead = 0  # bytes of a head, or around a body, since the parser last reported progress
    _is_refused = False
    _unparsed = b""  # what has been read since the connection's last turn
    _receive_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client `RECEIVE_TIMEOUT` for its first byte."""
        transport.set_write_buffer_limits(_UNREAD)
        super().connection_made(transport)
        transport.set_protocol(Reader(self, self.shared.read_buffer))
        self._close_if_idle_for(RECEIVE_TIMEOUT)
        self.shared.add(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Keep what has been read for this connection's turn, and read no more before it."""
        self.transport.pause_reading()
        if not self._unparsed:
            self.shared.turns.parse(self._parse)
        self._unparsed += data

    def _parse(self) -> None:
        """Parse a slice, so that what is neither a complete header nor body stays bounded."""
        if self._is_refused or self.transport.is_closing():
            self._unparsed = b""
        if self._unparsed:
            piece, self._unparsed = self._unparsed[:_SLICE], self._unparsed[_SLICE:]
            self._start_receive_timer()
            self._n_overhead += len(piece)
            self._feed(piece)
            if self._incoming is None and self._receive_timer is not None:
                self.shared.hold(self, len(piece))  # the head is unfinished
            if self._n_overhead > MAX_HEAD_BYTES + _SLICE:
                self._refuse_head()
        if self._unparsed:
            self.shared.turns.parse(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _feed(self, piece: bytes) -> None:
        """Let the parser read a piece. It would drop the body of a request with an offer."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except HttpParserUpgrade as offer:
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._unparsed = self._declined + piece[offer.args[0] :] + self._unparsed
            self._declined = b""
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

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
        if n_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        elif len(self.pipeline) == MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait for the answer to an earlier one"
            self.refuse(UnavailableError(f"{message}; read it first", retry_after=1))
        if self._is_refused or self.parser.get_method() == b"CONNECT":
            raise ValueError  # stops the parser
        if self.parser.should_upgrade():
            self._declined = without_offer(self.parser, self.url, self.headers)
            return
        super().on_headers_complete()
        answering: Any = AnswerTransport(self.transport, self._close)
        self.cycle.transport = answering
        if self.parser.get_http_version() < "1.1":
            end_by_close(self.cycle)
        if self._unanswered is None:
            self._answering = self.cycle
            self.shared.wait(self)
        self._incoming, self._n_overhead = self.cycle, 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, partial(self._answer, app))

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in its turn, once its client has read the answers before."""
        with suppress(asyncio.CancelledError):  # at shutdown
            await self.flow.drain()
            await self.shared.turns.wait(is_probe=path_of(scope) in HEALTH_PATHS)
            await app(scope, receive, send)

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        super().on_body(body)
        self._n_body += len(body)
        self._n_overhead = 0
        if not self.cycle.response_complete and self._path != UPLOAD_PATH:
            self.shared.hold(self, len(body))
            if self._is_refused:
                raise ValueError  # stops the parser

    def on_message_complete(self) -> None:
        """Stop the clock of a request, and refuse it if too many others are being answered."""
        if self._declined:
            return
        super().on_message_complete()
        self._incoming, self._n_overhead = None, 0
        self._stop_receive_timer()
        self.shared.unfinished.release(self)
        if self.cycle.response_complete:  # data that came since has stopped uvicorn's timer
            self._close_if_idle_for(self.timeout_keep_alive)
        elif self._path not in PROBED_PATHS and not self.shared.begin(self):
            message = "too many connections have a request; try again"
            self.refuse(UnavailableError(message, retry_after=1))

    def _close_if_idle_for(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def _start_receive_timer(self) -> None:
        if self._receive_timer is None:
            self._n_body = 0
            self._receive_timer = self.loop.call_later(RECEIVE_TIMEOUT, self._check_received)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _check_received(self) -> None:
        self._receive_timer = None
        is_pipelined = self._unanswered not in (None, self._incoming)
        is_wanted = self._incoming is not None and not self._incoming.response_complete
        is_fast = self._n_body >= MIN_BODY_RATE * RECEIVE_TIMEOUT
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
        many = f"more than {MAX_HEAD_BYTES} bytes, or there are more than {MAX_HEADERS} headers"
        message = f"the request's URL and headers, or its trailers, have {many}; send less"
        self.refuse(HeadTooLargeError(message))

    def refuse(self, error: KvasirError) -> None:
        """Answer with an error unless another answer has begun, disconnect that one, then close.

        The connection lingers, so that a client that is still sending reads the answer.
        """
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_receive_timer()
        self.shared.unfinished.release(self)
        self.pipeline.clear()
        self._disconnect_unanswered()
        if self._unanswered is not None and self._unanswered.response_started:
            self.transport.close()
            return
        if self._incoming is None or not self._incoming.response_complete:
            self.transport.write(refusal(self.fastapi, self._path, self.headers or [], error))
        self._linger()

    def _close(self) -> None:
        """Close the connection after an answer."""
        if self._incoming is self._answering:  # the client is still sending the request
            self._is_refused = True
            self._stop_receive_timer()
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER, self.transport.close)

    def on_response_complete(self) -> None:
        """Note which request is answered next, if any."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        else:
            self.shared.unfinished.release(self)
        super().on_response_complete()
        if self._unanswered in (None, self._incoming):
            self.shared.wait(self)

    def pause_writing(self) -> None:
        """Start the clock of a client that does not read, and count what it leaves unread."""
        super().pause_writing()
        cycle, n_left = self._unanswered, self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_timeout, self._check_sent, n_left)
        if cycle is not None and f"{UPLOAD_PATH}/" not in cycle.scope["path"]:  # no file
            n_left += cycle.expected_content_length
        self.shared.stall(self, n_left)

    def resume_writing(self) -> None:
        """Stop the clock of a client that reads again."""
        super().resume_writing()
        self.shared.unread.release(self)
        if self._send_timer is not None:
            self._send_timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on answering a client that has ended its side only; return whether there is one.

        Writing shows whether it has closed the other side, too. A client of HTTP/1.0 takes no
        interim response, and so is taken for one that has closed.
        """
        while self._unparsed:
            self._parse()
        cycle = self._unanswered
        if cycle in (None, self._incoming) or self._is_refused:
            return False
        if cycle.scope["http_version"] < "1.1" and not cycle.response_started:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        cycle = self._unanswered
        if cycle is not None and not self._is_refused and not self.transport.is_closing():
            if not cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_PROBE_INTERVAL, self._probe)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application, and stop all clocks."""
        self._unparsed = b""
        self.resume_writing()
        self.shared.remove(self)
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
        is_complete = self._unanswered is None or not self._unanswered.response_started
        if is_complete and self.transport.get_write_buffer_size() < n_left:
            self.pause_writing()
        else:
            self.cut_off()
