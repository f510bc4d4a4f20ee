"""One client's connection: how long it may take to send and to read, and how large a request's head may be.

uvicorn, which does the rest, knows no such limits.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from fastapi import FastAPI
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.api.middleware import log_request, new_state
from server.api.responses import error_response
from server.errors import HeadTooLargeError, InvalidRequestError, KvasirError, UnavailableError
from server.process.connection_limit import ConnectionLimit
from server.settings import Settings

logger = logging.getLogger("kvasir")

MOST_HEADERS = 128
SLOWEST = 500  # bytes of a body a second, as a mean over `receive_timeout`
_SLICE = 4096  # bytes that the parser gets at a time: it tells of a header only when that is whole
_LINGER = 2  # seconds for a client that is still sending to read that it should not


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's, within limits.

    A request has to come within `receive_timeout` of the connection's or its own first byte, or its body fast enough.
    After an answer, an idle connection is the keep-alive's, and while one is made nothing else has to come.

    A client that does not read is cut off after `send_timeout`: to the application it has then left. A whole answer
    holds no place any more, so its client may take its time, as long as it takes something.

    A client may send its next request early. uvicorn's `cycle` is then that one's: a connection that is lost has to be
    told to the one that is being answered.
    """

    fastapi: FastAPI
    settings: Settings
    limit: ConnectionLimit
    url = b""
    _answering: RequestResponseCycle | None = None
    _sending: asyncio.TimerHandle | None = None
    _receiving: asyncio.TimerHandle | None = None
    _n_received = 0  # bytes of a body since that timer was started
    _n_around = 0  # bytes of a head, or of what is around a body, since anything of it came, but for the first slice
    _in_head = False
    _in_body = False
    _excess: HeadTooLargeError | None = None
    _is_refused = False

    # Requests that come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._idle(self.settings.receive_timeout)
        self.limit.let_in(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self._receiving is None:
            self._expect()
        for start in range(0, len(data), _SLICE):
            if self._is_refused:
                return
            piece = data[start : start + _SLICE]
            self._n_around += len(piece)
            super().data_received(piece)
            if self._n_around > self.settings.max_header_bytes and not self._is_refused:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._n_around = True, 0
        if self._receiving is None:
            self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and no trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        n_bytes = len(self.url) + sum(
            len(name) + len(value) + len(": \r\n") for name, value in self.headers
        )
        if n_bytes > self.settings.max_header_bytes or len(self.headers) > MOST_HEADERS:
            self._excess = self._too_large()
            raise self._excess  # the parser stops; uvicorn wants to send a 400
        super().on_headers_complete()
        self.limit.asks(self)
        self._in_head, self._in_body, self._n_around = False, True, 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._n_received += len(body)
        self._n_around = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body, self._n_around = False, 0
        self._stop_expecting()
        if (
            self.cycle.response_complete
        ):  # before it had come, and what came since has stopped the keep-alive's clock
            self._idle(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unanswered is None:
            self.limit.idles(self)

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever asks for another protocol is answered in this one. What comes next cannot be parsed any more."""
        self.cycle.keep_alive = False

    def _idle(self, wait: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(wait, self.timeout_keep_alive_handler)

    def _expect(self) -> None:
        self._n_received = 0
        self._receiving = self.loop.call_later(self.settings.receive_timeout, self._check_received)

    def _stop_expecting(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _check_received(self) -> None:
        is_next = self._unanswered is not None and not (
            self._in_body and self.cycle is self._unanswered
        )
        is_fast = self._in_body and self._n_received >= SLOWEST * self.settings.receive_timeout
        if self.flow.read_paused or is_next or (is_fast and not self.cycle.response_complete):
            self._expect()
        else:
            self._receiving = None
            self.cut("cut off a client that sends too slowly")

    # What is no request

    def refuse_unfinished(self) -> None:
        """Answer a request that has begun to come and, as the server goes down, will not come as a whole."""
        is_next = self._unanswered is (None if self._in_head else self.cycle)
        if (self._in_head or self._in_body) and is_next and not self._is_refused:
            self._refuse(UnavailableError("the server is shutting down; try again", retry_after=1))

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._excess or InvalidRequestError(msg))

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(
            f"the request's URL and headers, or its trailers, have more than {self.settings.max_header_bytes} bytes, "
            f"or there are more than {MOST_HEADERS} headers; send less"
        )

    def _refuse(self, error: KvasirError) -> None:
        """Answer, unless that has been done or another answer has begun, and close; a request before it is lost.

        The client may still be sending. Were the connection closed at once, it would not get to read the answer.
        """
        self._is_refused, self._in_head = True, False
        self._stop_expecting()
        cycle = self._unanswered
        self._tell_unanswered()
        if cycle is not None and cycle.response_started:
            self.transport.close()
            return
        if not (self._in_body and self.cycle.response_complete):
            self.transport.write(self._refusal(error))
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER, self.transport.close)

    def _refusal(self, error: KvasirError) -> bytes:
        given = next(
            (
                value.decode("latin-1")
                for name, value in self.headers or ()
                if name == b"x-request-id"
            ),
            None,
        )
        path = self.url.partition(b"?")[0][:200].decode("latin-1")
        state = new_state(given)
        scope: Scope = {
            "type": "http",
            "app": self.fastapi,
            "method": None,
            "path": path,
            "state": {"request": state},
        }
        response = error_response(scope, error)
        log_request(scope, response.status_code, 0.0)
        headers = [
            *response.raw_headers,
            (b"x-request-id", state.id.encode()),
            (b"connection", b"close"),
        ]
        head = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
        lines = [
            head,
            *(name + b": " + value for name, value in headers),
            b"",
            bytes(response.body),
        ]
        return b"\r\n".join(lines)

    # Answers that go

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.asks(self)
        self._unwatch()
        self._stop_expecting()
        self._tell_unanswered()
        super().connection_lost(exc)

    @property
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request whose answer is being made."""
        cycle = self._answering
        return None if cycle is None or cycle.response_complete else cycle

    def _tell_unanswered(self) -> None:
        """Its connection is lost."""
        if self._unanswered is not None:
            self._unanswered.message_event.set()
            self._unanswered.disconnected = True

    @property
    def is_stalled(self) -> bool:
        return self._sending is not None

    def cut(self, why: str = "cut off a client that does not read") -> None:
        logger.warning(why)
        self.drop()

    def drop(self) -> None:
        self.transport.abort()

    def _watch(self) -> None:
        n_left = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.settings.send_timeout, self._check_sent, n_left)

    def _unwatch(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _check_sent(self, n_left: int) -> None:
        if self._unanswered is None and self.transport.get_write_buffer_size() < n_left:
            self._watch()
        else:
            self.cut()
