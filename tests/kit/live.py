"""A real uvicorn in a thread, on a fake runner and a free port, for tests over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from kvasir.server.process.serve import bind, configure
from kvasir.server.requests.async_engine import AsyncEngine
from kvasir.server.requests.served_model import ServedModel
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_app, on_submission, sample

KEY = "a-key"


class Live:
    """A server in a thread; semaphores announce its events to tests that wait for them."""

    def __init__(self, app: FastAPI, runner: FakeRunner) -> None:
        self.runner = runner
        self.submitted = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        self.freed = threading.Semaphore(0)
        self.model: ServedModel = app.state.models.find()
        self._announce(self.model.engine)
        listener = bind("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.server = uvicorn.Server(configure(app))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        gc.freeze()  # as `serve` does
        self.thread.start()

    def _announce(self, engine: AsyncEngine) -> None:
        cancel, free = engine.cancel, self.runner.kv.free

        def leaving(*arguments: Any) -> None:
            cancel(*arguments)
            self.left.release()

        def freeing(row: int) -> None:
            free(row)
            self.freed.release()

        on_submission(engine, self.submitted.release)
        engine.cancel = leaving  # type: ignore[assignment,method-assign]
        self.runner.kv.free = freeing  # type: ignore[method-assign]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop, once it has answered a request."""
        return self.model.engine._loop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=TIMEOUT
        )

    def post_raw(self, path: str = "/v1/completions", **body: Any) -> socket.socket:
        """Send a request on a socket of its own, which the test may close at any time."""
        content = json.dumps({"prompt": "a", "logit_bias": {"66": 100}} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
        connection = socket.socket()
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        return connection

    def value(self, name: str, **labels: str) -> float:
        return sample(self.model.metrics, name, **labels) or 0.0

    def close(self) -> None:
        self.runner.release()
        self.server.should_exit = True
        self.thread.join(TIMEOUT)
        gc.unfreeze()
        assert not self.thread.is_alive()


def wait(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=TIMEOUT)


@contextmanager
def live(runner: FakeRunner | None = None, **settings: Any) -> Iterator[Live]:
    runner = runner or FakeRunner(VOCAB_SIZE)
    with live_app(fake_app(runner, **{"api_key": KEY} | settings), runner) as started:
        yield started


@contextmanager
def live_app(app: FastAPI, runner: FakeRunner | None = None) -> Iterator[Live]:
    """Serve an application; the runner is its own, if it continues texts."""
    started = Live(app, runner or FakeRunner(VOCAB_SIZE))
    try:
        yield started
    finally:
        started.close()
