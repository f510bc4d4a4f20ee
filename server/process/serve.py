"""The server process: checks before it listens, signals, and draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from concurrent.futures import Future
from ipaddress import ip_address
from types import FrameType

import uvicorn
from fastapi import FastAPI

from model.bundle import BundleError, ModelBundle, load_bundle
from server.engine.cuda.runtime import NoDeviceError
from server.errors import StartupError
from server.process.app import create_app
from server.process.connection import BoundedConnection, SharedLimits, max_connections
from server.requests.service import Service, onnxruntime_version
from server.settings import Settings
from server.telemetry.logs import log_to_stderr
from server.telemetry.start_clock import StartClock

logger = logging.getLogger("kvasir")

# Seconds; longer than proxies' and clients', or they may reuse a connection that is being closed.
_KEEP_ALIVE = 75
_BODIES = 16  # bodies of `max_body_bytes` that the unfinished ones may add up to
_LAST_READ = 5  # seconds for clients to read what is written, once every request has ended
_LAST_TASKS = 2  # seconds for the handlers of connections that were cut off to end


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: after a signal running requests finish, new ones get 503.

    uvicorn itself would close its sockets first.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.on_load_failure = self._fail
        self.failure: Exception | None = None
        self._draining: Future[None] | None = None  # the reference keeps the task alive

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address of the playground."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port, *_ = listener.getsockname()
            page = f"http://{_browsable(host)}:{port}/"
            if not (ip_address(host).is_loopback or self.service.settings.has_keys):
                warning = (
                    "without API keys whoever reaches this address can use it; set api_key_file"
                )
                logger.warning(warning, extra={"fields": {"host": host}})
            fields = {"host": host, "port": port, "playground": page}
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
        seconds = self.service.settings.drain_timeout
        timer = asyncio.get_running_loop().call_later(seconds, self._cut_off, True)
        await self.service.drain()
        timer.cancel()
        self.should_exit = True

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
        return [one for one in self.server_state.connections if isinstance(one, BoundedConnection)]

    def _fail(self, error: Exception) -> None:
        """End the process because the model could not be loaded."""
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
    bundle = check_model(settings)
    clock.lap("model_directory")
    log = log_to_stderr(settings.log_level)
    installed, verified = onnxruntime_version(), bundle.manifest.versions.get("onnxruntime")
    if verified not in (None, installed):
        fields = {"installed": installed, "verified_with": verified}
        message = "another ONNX Runtime than the model was verified with"
        logger.warning(message, extra={"fields": fields})
    app = create_app(settings, bundle, clock=clock)
    server = DrainingServer(configure(app), app.state.service)
    listener = bind(settings.host, settings.port)
    # Else each full collection walks all modules, for which every stream waits some 60 ms.
    gc.freeze()
    server.run(sockets=[listener])
    log.flush()
    if server.failure is not None:
        reason = " ".join(str(server.failure).split())
        raise StartupError(f"{settings.model} cannot be served: {reason}")
    engine = server.service.engine
    if engine.is_running or engine.failed:  # a thread that still runs loads the model, or hangs
        _exit_now(int(engine.failed))


def configure(app: FastAPI) -> uvicorn.Config:
    """Return uvicorn's configuration for an application from `create_app`."""
    known: Settings = app.state.service.settings

    class Connection(BoundedConnection):
        fastapi = app
        settings = known
        shared = SharedLimits(max_connections(), _BODIES * known.max_body_bytes)

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        root_path=known.root_path,
        log_config=None,
        log_level=logging.ERROR,  # each refused request has a line of ours
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_READ + _LAST_TASKS,
        timeout_keep_alive=_KEEP_ALIVE,
    )


def check_model(settings: Settings) -> ModelBundle:
    """Load a model directory. Raises StartupError if it is damaged or cannot be served here."""
    try:
        bundle = load_bundle(settings.model)
    except BundleError as error:
        raise StartupError(str(error)) from None
    if bundle.manifest.device != "cuda":
        return bundle
    from server.engine.cuda.session import require_cuda  # noqa: PLC0415  imports ONNX Runtime

    try:
        require_cuda()
    except NoDeviceError as error:
        raise StartupError(f"{settings.model} was exported for cuda: {error}") from None
    for name in settings.model_fields_set & {"threads", "spin_microseconds"}:
        raise StartupError(f"setting {name} is for the CPU; leave it out for a model on a GPU")
    if settings.prefix_cache_memory:
        cause = "setting prefix_cache_memory can only be 0 on a GPU"
        raise StartupError(f"{cause}: blocks are kept in kv_cache_memory")
    return bundle


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens, and so holds the port. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        cause = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            cause = f"port {port} is in use on {host}; stop what listens there, or choose another"
        raise StartupError(cause) from None


def _exit_now(code: int) -> None:
    """End the process while its engine is inside ONNX Runtime, where a normal exit crashes."""
    logging.shutdown()
    os._exit(code)
