"""The server process: checks before it listens, signals, and draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from concurrent.futures import Future
from ipaddress import ip_address
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvasir.model.directory import ModelDirectory
from kvasir.server.errors import StartupError
from kvasir.server.process.app import create_app
from kvasir.server.process.connection import BoundedConnection
from kvasir.server.process.engine_builder import check_model
from kvasir.server.process.shared_limits import SharedLimits, max_connections
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import Settings
from kvasir.server.telemetry.logs import log_to_stderr
from kvasir.server.telemetry.start_clock import StartClock

logger = logging.getLogger("kvasir")

# Seconds; longer than proxies' and clients', or they may reuse a connection that is being closed.
_KEEP_ALIVE = 75
_BODIES = 6  # bodies of `max_body_bytes` that the unfinished ones may add up to
_SWITCH_INTERVAL = 0.0002  # seconds
_MOST_UNREAD = 2**25  # bytes of answers that may wait for clients to read
_LAST_READ = 3  # seconds for clients to read what is written, once every request has ended
_LAST_TASKS = 1  # seconds for the handlers of connections that were cut off to end


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: after a signal running requests finish, new ones get 503.

    uvicorn itself would close its sockets first.
    """

    def __init__(self, config: uvicorn.Config, models: ModelRegistry) -> None:
        super().__init__(config)
        self.models = models
        self.models.on_load_failure = self._fail
        self.failure: StartupError | None = None
        # The reference keeps the task alive.
        self._draining: Future[None] | asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address of the playground."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port, *_ = listener.getsockname()
            page = f"http://{_browsable(host)}:{port}/"
            if not (ip_address(host).is_loopback or self.models.settings.has_keys):
                warning = (
                    "without API keys whoever reaches this address can use it; set api_key_file"
                )
                if self.models.settings.allowed_hosts is None:
                    warning += "; host names get 403 until --allowed-hosts lists them"
                logger.warning(warning, extra={"fields": {"host": host}})
            about = {
                name: "{precision} on {device}".format(**served.describe_model())
                for name, served in self.models.served.items()
            }
            fields = {"host": host, "port": port, "playground": page, "models": about}
            logger.info("listening", extra={"fields": fields})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's
        """Drain on the first signal, exit at once with code 1 on the second."""
        if not self.started:
            self.should_exit = True
        elif self._draining is not None:
            _exit_now(1)
        else:
            draining = self._drain(signal.Signals(sig).name)
            loop = asyncio.get_running_loop()
            self._draining = asyncio.run_coroutine_threadsafe(draining, loop)

    async def _drain(self, cause: str) -> None:
        logger.info("draining", extra={"fields": {"cause": cause}})
        seconds = self.models.settings.drain_timeout
        timer = asyncio.get_running_loop().call_later(seconds, self._cut_off, True)
        await self.models.drain()
        timer.cancel()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Drain once an engine has failed or hangs, if the settings say so."""
        can_exit = self.models.settings.exit_on_failure and self._draining is None
        if can_exit and "unhealthy" in self.models.states.values():
            self._draining = asyncio.ensure_future(self._drain("an engine has failed or hangs"))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse unfinished requests, then close all connections."""
        for connection in self._connections():
            connection.refuse_unfinished()
        timer = asyncio.get_running_loop().call_later(_LAST_READ, self._cut_off, False)
        await super().shutdown(sockets)
        timer.cancel()

    def _cut_off(self, only_stalled: bool) -> None:
        for connection in self._connections():
            if connection.flow.write_paused:
                connection.cut_off()
            elif not only_stalled:
                connection.cut_off("cut off a client whose connection outlasts the shutdown")

    def _connections(self) -> list[BoundedConnection]:
        connections = self.server_state.connections
        return [each for each in connections if isinstance(each, BoundedConnection)]

    def _fail(self, error: StartupError) -> None:
        """End the process because no model could be loaded."""
        self.failure = error
        self.should_exit = True


def _browsable(host: str) -> str:
    """Return a listening address as a browser on this machine writes it."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  compared, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host


def serve(settings: Settings) -> None:
    """Serve until a signal arrives. Raises StartupError, in one line, when that is impossible."""
    clock = StartClock()
    clock.lap("imports_and_settings")
    model_dirs = {name: _checked(settings, name) for name in settings.models}
    clock.lap("model_directory")
    log = log_to_stderr(settings.log_level, settings.log_format)
    app = create_app(settings, model_dirs, clock=clock)
    server = DrainingServer(configure(app), app.state.models)
    listener = bind(settings.host, settings.port)
    # Else each full collection walks all modules, for which every stream waits some 60 ms.
    gc.freeze()
    # An engine's step takes the interpreter's lock a dozen times; each would wait 5 ms for it.
    sys.setswitchinterval(_SWITCH_INTERVAL)
    server.run(sockets=[listener])
    log.flush()
    if server.failure is not None:
        raise server.failure
    engines = [served.engine for served in server.models.served.values()]
    has_failed = any(engine.failed for engine in engines)
    if has_failed or any(engine.is_running for engine in engines):  # a thread loads, or hangs
        _exit_now(int(has_failed))


def configure(app: FastAPI) -> uvicorn.Config:
    """Return uvicorn's configuration for an application from `create_app`."""
    settings: Settings = app.state.models.settings

    class Connection(BoundedConnection):
        fastapi = app
        send_timeout = settings.send_timeout
        shared = SharedLimits(max_connections(), _BODIES * settings.max_body_bytes, _MOST_UNREAD)

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        root_path=settings.root_path,
        log_config=None,
        log_level=logging.ERROR,  # each refused request has a line of ours
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_READ + _LAST_TASKS,
        timeout_keep_alive=_KEEP_ALIVE,
    )


def _checked(settings: Settings, name: str) -> ModelDirectory | StartupError:
    """Return a model directory, or the reason why it cannot be served."""
    try:
        return check_model(settings, name)
    except StartupError as error:
        return error


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens, and so holds the port. Raises StartupError."""
    is_any = host == "::"
    if is_any and not socket.has_dualstack_ipv6():
        is_any, host = False, "0.0.0.0"  # noqa: S104  asked for
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=is_any
        )
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        cause = f"cannot listen on {host} port {port}: {reason}; choose another host or port"
        if error.errno == errno.EADDRINUSE:
            cause = f"port {port} is in use on {host}; stop what listens there, or choose another"
        raise StartupError(cause) from None


def _exit_now(code: int) -> None:
    """End the process while its engine is inside ONNX Runtime, where a normal exit crashes."""
    logging.shutdown()
    os._exit(code)
