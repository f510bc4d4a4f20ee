"""The process: checks before it binds, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from model.bundle import BundleError, ModelBundle, load_bundle
from server.engine.cuda.runtime import NoDeviceError
from server.errors import StartupError
from server.process.app import create_app
from server.process.connection import PatientProtocol
from server.process.connection_limit import ConnectionLimit, most_connections
from server.requests.service import Service, onnxruntime_version
from server.settings import Settings
from server.telemetry.logs import log_to_stderr
from server.telemetry.start_clock import StartClock

logger = logging.getLogger("kvasir")

_KEEP_ALIVE = 75  # seconds; longer than proxies and clients keep theirs, or a request may meet a closing connection
_LAST_BYTES = 5  # seconds for connections to take what is written, once every request has ended
_CUTTING = 2  # seconds for the requests of clients that were cut off then to end


class DrainingServer(uvicorn.Server):
    """uvicorn would close its sockets first on SIGTERM; here running requests finish first, while new ones get 503.

    A second signal leaves at once, with an exit code of 1.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.on_load_failure = self.fail
        self.failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_go = False
        self._draining: asyncio.Task[None] | None = (
            None  # kept, or it might be collected while it runs
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            host, port, *_ = listener.getsockname()
            fields = {
                "host": host,
                "port": port,
                "playground": f"http://{_reachable(host)}:{port}/",
            }
            logger.info("listening", extra={"fields": fields})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's signature
        if self._loop is None:
            self.should_exit = True
        elif not self._told_to_go:
            self._told_to_go = True
            self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)
        else:
            _leave(1)

    def _start_draining(self, cause: str) -> None:
        logger.info("draining", extra={"fields": {"cause": cause}})
        self._draining = asyncio.ensure_future(self._drain())

    def fail(self, error: Exception) -> None:
        """The model could not be loaded: end the process, which then says why."""
        self.failure = error
        self.should_exit = True

    async def _drain(self) -> None:
        timer = asyncio.get_running_loop().call_later(
            self.service.settings.drain_timeout, self._cut_stalled
        )
        await self.service.drain()
        timer.cancel()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(_LAST_BYTES, self._cut_all)
        for connection in self._connections():
            connection.refuse_unfinished()
        await super().shutdown(sockets)
        timer.cancel()

    def _cut_stalled(self) -> None:
        for connection in self._connections():
            if connection.is_stalled:
                connection.cut()

    def _cut_all(self) -> None:
        for connection in self._connections():
            connection.cut()

    def _connections(self) -> list[PatientProtocol]:
        return [one for one in self.server_state.connections if isinstance(one, PatientProtocol)]


def _reachable(host: str) -> str:
    """How a browser on this machine writes an address that is listened on, which may be every one there is."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  read, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host


def run(settings: Settings) -> None:
    """Serve until a signal says otherwise. Raises StartupError, in one line, when that cannot be."""
    clock = StartClock()
    clock.lap("imports_and_settings")
    bundle = check_model(settings)
    clock.lap("model_directory")
    log = log_to_stderr(settings.log_level)
    _compare_runtimes(bundle)
    app = create_app(settings, bundle, clock=clock)
    server = DrainingServer(configure(app), app.state.service)
    listener = bind(settings.host, settings.port)
    server.run(sockets=[listener])
    log.flush()
    if server.failure is not None:
        raise StartupError(
            f"{settings.model} cannot be served: {' '.join(str(server.failure).split())}"
        )
    if server.service.engine.is_running:
        _leave(int(server.service.engine.failed))  # still loading, or hanging


def configure(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves an application of ours."""
    known: Settings = app.state.service.settings

    class Protocol(PatientProtocol):
        fastapi = app
        settings = known
        limit = ConnectionLimit(most_connections())

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        root_path=known.root_path,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_BYTES + _CUTTING,
        timeout_keep_alive=_KEEP_ALIVE,
    )


def check_model(settings: Settings) -> ModelBundle:
    """Read the model directory and its hashes. Raises StartupError for one that this server cannot run."""
    try:
        bundle = load_bundle(settings.model)
    except BundleError as error:
        raise StartupError(str(error)) from None
    if bundle.manifest.device == "cuda":
        from server.engine.cuda.session import require_cuda  # noqa: PLC0415  imports ONNX Runtime

        try:
            require_cuda()
        except NoDeviceError as error:
            raise StartupError(f"{settings.model} was exported for cuda: {error}") from None
        _refuse_settings_of_the_cpu(settings)
    return bundle


def _refuse_settings_of_the_cpu(settings: Settings) -> None:
    for name in ("threads", "spin_microseconds"):
        if name in settings.model_fields_set:
            raise StartupError(f"setting {name} is for the CPU; leave it out for a model on a GPU")
    if settings.prefix_cache_memory:
        raise StartupError(
            "setting prefix_cache_memory can only be 0 on a GPU: blocks are kept in kv_cache_memory"
        )


def _compare_runtimes(bundle: ModelBundle) -> None:
    installed, verified = onnxruntime_version(), bundle.manifest.versions.get("onnxruntime")
    if verified not in (None, installed):
        fields = {"installed": installed, "verified_with": verified}
        logger.warning(
            "another ONNX Runtime than the model was verified with", extra={"fields": fields}
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that nobody else takes the port meanwhile. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} is in use on {host}; stop what listens there, or choose another"
            ) from None
        raise StartupError(
            f"cannot listen on {host} port {port}: {error.strerror or error}"
        ) from None


def _leave(code: int) -> None:
    """End the process although the engine's thread is inside ONNX Runtime, which would not survive a normal exit."""
    logging.shutdown()
    os._exit(code)
