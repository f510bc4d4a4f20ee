"""The application: routes, middleware, and the model's coming and going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from model.bundle import ModelBundle
from server.api.explain import Explanations
from server.api.keys import ApiKeys
from server.api.middleware import body_limit, error_responses, key_check, request_context
from server.api.routes import add_routes
from server.engine.engine import Engine
from server.engine.prefix_cache import PrefixCache
from server.errors import StartupError
from server.requests.service import Service
from server.settings import Settings
from server.telemetry.start_clock import StartClock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("kvasir")

_LAST_SPANS = 3.0  # seconds for them to reach the collector, at shutdown
CPU_CHUNK = 256  # prompt tokens in a step, unless set


def create_app(
    settings: Settings,
    bundle: ModelBundle,
    engine: Engine | None = None,
    clock: StartClock | None = None,
) -> FastAPI:
    """The server as an ASGI application; `app.state.service` is what it runs on.

    A ready engine serves from the first request. Without one the model is loaded once the application is up, and until
    then requests get 503; should that fail, the service's `on_load_failure` is told why. The log gets the laps of
    `clock`. Raises StartupError for a file of keys that gives none.
    """
    key = settings.api_key.get_secret_value() if settings.api_key else None
    keys = ApiKeys(key, settings.api_key_file)
    service = Service(settings, bundle)
    clock = clock or StartClock()
    provider = _make_provider(settings.otlp_endpoint) if settings.otlp_endpoint else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        clock.lap("application")
        loading = asyncio.create_task(
            service.start(lambda: engine or build_engine(settings, bundle, clock), clock)
        )
        if engine is not None:
            await loading
        yield
        loading.cancel()
        await service.engine.stop()
        service.grammars.close()
        if provider is not None:
            await _send_last_spans(provider)

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    app.state.explanations = Explanations(bundle)
    add_routes(app)
    app.add_middleware(body_limit, max_bytes=settings.max_body_bytes)
    app.add_middleware(key_check, keys=keys, most=settings.max_concurrency_per_key)
    app.add_middleware(error_responses)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        )
    app.add_middleware(request_context)
    if provider is not None:
        from server.telemetry.tracing import Tracing  # noqa: PLC0415  imports opentelemetry

        app.add_middleware(
            Tracing, provider=provider, model=settings.model_name
        )  # the last one is the outermost
    return app


def _make_provider(endpoint: str) -> TracerProvider:
    try:
        from server.telemetry.tracing import make_provider  # noqa: PLC0415  imports opentelemetry
    except ImportError as error:
        wanted = "pip install -c constraints.txt -e '.[cpu,otel]'"
        raise StartupError(f"otlp_endpoint needs {error.name}; install it with: {wanted}") from None
    return make_provider(endpoint, version("kvasir-lm"))


async def _send_last_spans(provider: TracerProvider) -> None:
    """In a thread that the process does not wait for: the exporter tries long to reach a collector that is gone."""
    sending = Thread(target=provider.shutdown, name="last spans", daemon=True)
    sending.start()
    await asyncio.to_thread(sending.join, _LAST_SPANS)


def build_engine(
    settings: Settings, bundle: ModelBundle, clock: StartClock | None = None
) -> Engine:
    """Load the model and warm it up, which takes a while. Raises ValueError for what cannot be had here."""
    if settings.speculate:
        logger.info("speculation is on: the load may change answers, by rounding")
    build = _build_on_cuda if bundle.manifest.device == "cuda" else _build_on_cpu
    return build(settings, bundle, clock or StartClock())


def _build_on_cpu(settings: Settings, bundle: ModelBundle, clock: StartClock) -> Engine:
    from server.engine.runner import OnnxRunner  # noqa: PLC0415  imports ONNX Runtime

    runner = OnnxRunner(
        bundle.graph_path,
        bundle.config,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_memory,
        threads=settings.threads,
        spin_microseconds=settings.spin_microseconds,
    )
    clock.lap("session")
    runner.warm_up()
    clock.lap("warm_up")
    budget = settings.prefix_cache_memory
    cache = PrefixCache(runner.rows, runner.kv_cache_bytes // 10 if budget is None else budget)
    chunk_size = settings.chunk_size or CPU_CHUNK
    return Engine(runner, chunk_size=chunk_size, prefix_cache=cache, speculate=settings.speculate)


def _build_on_cuda(settings: Settings, bundle: ModelBundle, clock: StartClock) -> Engine:
    from server.engine.cuda.session import LONGEST_CHUNK, open_cuda_runner  # noqa: PLC0415  as above

    runner = open_cuda_runner(
        bundle.graph_path,
        bundle.config,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_memory,
        keep_prompts=settings.prefix_cache_memory != 0,
    )
    clock.lap("session_and_warm_up")
    return Engine(
        runner, chunk_size=settings.chunk_size or LONGEST_CHUNK, speculate=settings.speculate
    )
