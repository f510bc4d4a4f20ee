"""Streams: when they start, how errors end them, and that they are always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kvasir.server.api.http.responses import EventStream, event, failure
from kvasir.server.errors import UnavailableError
from kvasir.server.requests.completion import RequestState


class Client:
    """The ASGI side of a client that disconnects when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.messages: list[Message] = []
        self.got = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.got.set()


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "path": "/v1/completions",
        "state": {"request": RequestState("mine", 0.0)},
    }


async def test_a_client_that_leaves_closes_the_stream_before_and_after_its_start() -> None:
    for n_before in (0, 1):
        closed, waiting, client = asyncio.Event(), asyncio.Event(), Client()

        async def events(
            n_before: int = n_before,
            closed: asyncio.Event = closed,
            waiting: asyncio.Event = waiting,
        ) -> AsyncGenerator[bytes, None]:
            try:
                for _ in range(n_before):
                    yield event("1")
                waiting.set()
                await asyncio.Event().wait()
            finally:
                closed.set()

        answering = asyncio.create_task(EventStream(events())(scope(), client.receive, client.send))
        await waiting.wait()
        client.left.set()
        with pytest.raises(ClientDisconnect):
            await answering
        assert closed.is_set()
        assert len(client.messages) == 2 * n_before


async def test_an_error_before_the_first_event_leaves_the_status_open() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise UnavailableError("not now")
        yield b""

    client = Client()
    with pytest.raises(UnavailableError):
        await EventStream(events())(scope(), client.receive, client.send)
    assert client.messages == []


async def test_a_bug_after_the_first_event_ends_the_stream_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event("1")
        raise ZeroDivisionError("secret")

    client = Client()
    await EventStream(events(), lambda fields: failure(fields) + b"bye")(
        scope(), client.receive, client.send
    )
    last = client.messages[-1]
    assert last["more_body"] is False
    assert last["body"].endswith(b'"code":null}}\n\nbye')
    assert b"secret" not in last["body"]
    assert "ZeroDivisionError" in caplog.text
