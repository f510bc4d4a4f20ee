"""Bytes between a transport and uvicorn: small reads, refusals, and answers of HTTP/1.0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from httptools import HttpRequestParser
from starlette.datastructures import Headers
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from kvasir.server.api.http.middleware import log_request, new_state
from kvasir.server.api.http.responses import error_response
from kvasir.server.errors import KvasirError


class Reader(asyncio.BufferedProtocol):
    """The protocol of a transport for another protocol, which reads as much as fits a buffer.

    uvloop would read 256 KiB at once into an `asyncio.Protocol`. Connections can share a buffer,
    because its content is copied at once.
    """

    def __init__(self, protocol: asyncio.Protocol, buffer: memoryview) -> None:
        self._receive, self._buffer = protocol.data_received, buffer
        for name in ("eof_received", "pause_writing", "resume_writing", "connection_lost"):
            setattr(self, name, getattr(protocol, name))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  asyncio's
        """Return the memory to read into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what has been read."""
        self._receive(bytes(self._buffer[:nbytes]))


class AnswerTransport:
    """A transport for an answer of uvicorn's, which a connection closes in its own way."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def without_offer(
    parser: HttpRequestParser, url: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """Return a request's head without its offer of another protocol.

    A server may ignore an offer (RFC 9110, 7.8). Java's HTTP client makes one with each request.
    """
    fields = (b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade")
    line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return line + b"".join(fields) + b"\r\n"


def refusal(
    app: FastAPI, path: str, headers: list[tuple[bytes, bytes]], error: KvasirError
) -> bytes:
    """Log a request that the application does not see, and return the answer to it."""
    state = new_state(Headers(raw=headers).get("x-request-id"))
    scope: Scope = {"type": "http", "app": app, "method": None, "path": path[:200]}
    scope.update(headers=headers, state={"request": state})
    response = error_response(scope, error)
    log_request(scope, response.status_code, 0.0)
    response.headers.update({"x-request-id": state.id, "connection": "close"})
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)


def end_by_close(cycle: RequestResponseCycle) -> None:
    """Send an answer as HTTP/1.0 knows it: without chunks, and ended by the connection's close."""
    send = cycle.send

    async def send_unframed(message: Any) -> None:
        if "content-length" not in Headers(raw=message.get("headers", [])):
            cycle.chunked_encoding = False
        n_left = cycle.expected_content_length
        cycle.expected_content_length = max(n_left, len(message.get("body", b"")))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]
    cycle.keep_alive = cycle.waiting_for_100_continue = False
