"""A client of attackers: whole answers over sockets, of which little is kept."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.victim import KEY

LIMIT = 120.0  # seconds for any answer
CLOSED, CUT, HANGS = 0, 598, 599  # instead of a status: no answer, a part of one, not in time
_SMALL = 4096  # bytes that a client's socket takes unread
_KEPT = 2**16
_STREAMED = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # ends a whole stream
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Site:
    """A server under attack. folder: for its batches. chance: the attackers' own."""

    port: int
    folder: Path = Path()
    chance: random.Random = field(default_factory=random.Random)

    async def n_running(self) -> float:
        """Return the number of sequences that run or wait."""
        answer = await ask(self, post("/metrics/router", b"", method="GET"))
        figures = re.findall(rb"^kvasir_num_requests_\S+ (\S+)$", answer.content, re.MULTILINE)
        return sum(map(float, figures))

    def http(self, key: str | None = KEY) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url, limits = f"http://127.0.0.1:{self.port}", httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=LIMIT, limits=limits)


@dataclass(slots=True)
class Answer:
    """status: or CLOSED, CUT, HANGS. content: the beginning of the body, which has n_bytes."""

    status: int
    content: bytes = b""
    end: bytes = b""  # the last bytes, with what marks chunks
    n_bytes: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def post(path: str, body: bytes | dict[str, Any], key: str = KEY, method: str = "POST") -> bytes:
    """Return the bytes of a request whose connection then closes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@asynccontextmanager
async def connected(site: Site, *, unread: bool = False) -> AsyncIterator[Connection]:
    """Connect; `unread`: nothing is read until `transport.resume_reading`."""
    if unread:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", site.port))
        reader, writer = await asyncio.open_connection(sock=one)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(
    site: Site, request: bytes, *, half_close: bool = False, begun: asyncio.Event | None = None
) -> Answer:
    """Send a request, and read its answer to the end.

    begun: is set by the first byte of its body, or by its end.
    """
    answer = Answer(CLOSED)
    begun = begun or asyncio.Event()
    try:
        async with asyncio.timeout(LIMIT), connected(site) as (reader, writer):
            writer.write(request)
            if half_close:
                writer.write_eof()
            head = await reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 1"):  # an interim response
                head = await reader.readuntil(b"\r\n\r\n")
            answer.status = int(head.split(b" ", 2)[1])
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            missing = int(length[1]) if length else None
            while missing is None or answer.n_bytes < missing:
                piece = await reader.read(_KEPT)
                if not piece:
                    break
                begun.set()
                answer.content += piece[: _KEPT - len(answer.content)]
                answer.n_bytes += len(piece)
                answer.end = (answer.end + piece)[-len(_STREAMED) :]
            if missing is not None and answer.n_bytes < missing:
                answer.status = CUT
            if b"chunked" in head.lower() and not answer.end.endswith(b"0\r\n\r\n"):
                answer.status = CUT
    except TimeoutError:
        answer.status = HANGS
    except asyncio.IncompleteReadError as error:
        answer.status = CUT if error.partial else CLOSED
    except OSError:
        answer.status = CUT if answer.status else CLOSED
    finally:
        begun.set()
    return answer


async def stream(port: int, begun: asyncio.Event | None = None, **fields: Any) -> str:
    """Stream a completion, and return how it came: `whole`, `refused`, `cut`, or `hangs`."""
    body = {"prompt": "def read", "stream": True, "ignore_eos": True} | fields
    answer = await ask(Site(port), post("/v1/completions", body), begun=begun)
    if answer.status == HANGS:
        return "hangs"
    if answer.status in (CLOSED, 429, 503):
        return "refused"
    return "whole" if answer.status == 200 and answer.end == _STREAMED else "cut"


async def statuses_of(reader: asyncio.StreamReader, most: int = 2**18) -> list[int]:
    """Return the statuses of the answers in the next bytes, until the connection closes."""
    came = b""
    try:
        async with asyncio.timeout(LIMIT):
            while len(came) < most and (piece := await reader.read(2**16)):
                came += piece
    except TimeoutError:
        return [HANGS]
    except ConnectionError:  # closed with bytes of ours unread
        pass
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", came)]
