"""A client that posts JSON over one connection and waits for each answer, as fast as asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import uvloop

from kvasir.loadtest.sse_client import error_message
from kvasir.server.process.local_server import serve_locally

Answer = tuple[float, Any]  # seconds, and the body
Rounds = list[list[tuple[float, ...]]]  # of each server, the figures of each round
T = TypeVar("T")


class _Body(bytearray):
    """The body of a response, as `httptools` reports it."""

    is_whole = False
    on_body = bytearray.extend

    def on_message_complete(self) -> None:
        self.is_whole = True


class JsonClient:
    """Requests to one route of a server."""

    def __init__(self, url: str, route: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        root = parts.path.rstrip("/").removesuffix("/v1")
        self._head = (
            f"POST {root}{route} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\n"
        )

    async def run(self, bodies: Iterable[bytes]) -> list[Answer]:
        """Send requests one after the other over a connection; raises ConnectionError."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            return [await self._ask(reader, writer, body) for body in bodies]
        finally:
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> Answer:
        sent, found = perf_counter(), _Body()
        parser = httptools.HttpResponseParser(found)
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            while not found.is_whole:
                if not (data := await reader.read(2**16)):
                    raise ConnectionError(f"{self._host} hung up before its answer was whole")
                parser.feed_data(data)
            seconds = perf_counter() - sent
            if (status := parser.get_status_code()) != 200:
                raise ConnectionError(f"HTTP {status}: {error_message(bytes(found))}")
            return seconds, json.loads(found)
        except (httptools.HttpParserError, ValueError) as error:
            form = "JSON" if isinstance(error, ValueError) else "HTTP"
            raise ConnectionError(f"the answer of {self._host} is not {form}: {error}") from None


def n_used(answer: Any, kind: str) -> int:
    """Return a figure of an answer's usage. Raises ConnectionError without one."""
    try:
        return int(answer["usage"][kind])
    except (KeyError, TypeError):
        raise ConnectionError(f"the answer has no usage.{kind}: {str(answer)[:200]}") from None


def medians(
    addresses: list[str],
    route: str,
    measure: Callable[[list[JsonClient]], Coroutine[Any, Any, Rounds]],
    make: Callable[..., T],
) -> list[T]:
    """Return `make(address, *medians of its rounds)` of each server.

    Raises as `served` does, and ConnectionError for a request that is refused.
    """
    with served(addresses, route) as clients:
        rounds = uvloop.run(measure(clients))
    return [
        make(address, *(median(of) for of in zip(*figures, strict=True)))
        for address, figures in zip(addresses, rounds, strict=True)
    ]


@contextmanager
def served(addresses: list[str], route: str) -> Iterator[list[JsonClient]]:
    """Yield a client for each address: a URL, or a model directory that is served meanwhile.

    Raises ValueError for an invalid URL, and ChildProcessError for a directory that cannot be
    served.
    """
    with ExitStack() as stack:
        urls = [
            one if "://" in one else stack.enter_context(serve_locally(Path(one)))
            for one in addresses
        ]
        yield [JsonClient(url, route) for url in urls]
