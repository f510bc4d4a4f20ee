"""The application: routes, middleware, and the loading and unloading of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import SecretStr
from starlette.middleware.cors import CORSMiddleware

from kvasir.model.directory import ModelDirectory
from kvasir.model.platform.files import in_words
from kvasir.model.platform.machine import yield_to_streams
from kvasir.server.api.explain.routes import Explanations
from kvasir.server.api.http.keys import ApiKeys
from kvasir.server.api.http.middleware import (
    body_limit,
    error_responses,
    key_check,
    page_check,
    request_context,
)
from kvasir.server.api.openai.batches import Answers, parse_line
from kvasir.server.api.openai.responses.store import ResponseStore
from kvasir.server.api.routes import add_routes
from kvasir.server.batches.shared_store import SharedStore
from kvasir.server.batches.shared_worker import SharedWorker
from kvasir.server.batches.store import BatchStore
from kvasir.server.batches.worker import BatchWorker
from kvasir.server.errors import StartupError
from kvasir.server.process.engine_builder import (
    build_beside_others,
    build_encoder_engine,
    build_engine,
    needed,
)
from kvasir.server.requests.async_engine import AnyEngine
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import Settings
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.state import State
from kvasir.server.telemetry.start_clock import StartClock

_FLUSH_SECONDS = 3.0  # for the last spans to reach the collector at shutdown


def create_app(
    settings: Settings,
    model_dirs: ModelDirectory | Mapping[str, ModelDirectory | StartupError],
    engine: AnyEngine | None = None,
    clock: StartClock | None = None,
) -> FastAPI:
    """Return the server as an ASGI application; `app.state.models` is what it runs on.

    model_dirs: a lone one, or those of several models and the errors of others, by name.
    A given engine serves a lone model from the first request. Otherwise models are loaded while the
    application is up, and requests get 503 until then. Raises StartupError for an unusable key
    file, without a model that can be served, or if packages for tracing are missing.
    """
    if isinstance(model_dirs, ModelDirectory):
        model_dirs = {settings.model_name: model_dirs}
    key = settings.api_key.get_secret_value() if settings.api_key else None
    state = _state(settings)
    salt = secret_of(settings, "salt")
    names_last = settings.prefix_dir is not None and not settings.share_prefix_cache
    if settings.has_keys and salt is None and (names_last or not isinstance(state, MemoryState)):
        needing = "prefix_dir" if names_last else "state_url"
        raise StartupError(
            f"setting {needing} needs a salt, or other servers would know no key of this one; make "
            "one with: openssl rand -hex 32"
        )
    keys = ApiKeys(key, settings.api_key_file, salt, state)
    models = ModelRegistry(settings, model_dirs)
    models.metrics.key_file_failed.set_function(lambda: keys.has_failed)
    models.metrics.shared_state_up.set_function(lambda: state.is_up)
    clock = clock or StartClock()
    tracing = _tracing() if settings.otlp_endpoint else None
    provider = tracing and tracing.make_provider(settings.otlp_endpoint, version("kvasir-lm"))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        clock.lap("application")
        await state.start()
        # By name: a new version of a model takes the place of one, which nothing here may keep.
        of_text = {name for name, one in models.served.items() if one.task == "generate"}
        for name in of_text - models.loader.names if engine is None else ():
            models.served[name].grammars.warm_up()

        def build(served: ServedModel, clock: StartClock) -> AnyEngine:
            if served.task != "generate" and of_text:
                yield_to_streams()
            make: Callable[..., AnyEngine] = (
                build_engine if served.task == "generate" else build_encoder_engine
            )
            return engine or build_beside_others(make, served, clock)

        app.state.loading = loading = asyncio.create_task(models.start(build, clock))
        if engine is not None:
            await loading
        async with _answering(app.state.batches):
            yield
        loading.cancel()
        await models.close()
        await state.close()
        if provider is not None:
            await asyncio.to_thread(_flush, provider.shutdown)

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.models = models
    of_folder = Explanations(models.loader.free)
    models.loader.on_shortage = of_folder.clear
    explanations = dict.fromkeys(models.loader.names, of_folder)
    staying = models.served.keys() - explanations.keys()
    app.state.explanations = explanations | {name: Explanations() for name in staying}
    app.state.batches = _batch_worker(app, keys if settings.has_keys else None, state)
    app.state.response_store = ResponseStore(state)
    add_routes(app)
    _add_middleware(app, keys)
    if tracing is not None:
        app.add_middleware(tracing.request_spans, provider=provider, model=settings.model_name)
    app.add_middleware(request_context)
    return app


def secret_of(settings: Settings, name: Literal["salt", "state_url"]) -> str | None:
    """Return a secret that a setting holds, or the file that the setting `name_file` names.

    Raises StartupError for both, and for a file that cannot be read or is empty.
    """
    given: SecretStr | None = getattr(settings, name)
    path: Path | None = getattr(settings, f"{name}_file")
    if path is None:
        return None if given is None else given.get_secret_value()
    if given is not None:
        raise StartupError(f"settings {name} and {name}_file: give one of them")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise StartupError(f"setting {name}_file: {in_words(error)}") from None
    if not text:
        raise StartupError(f"setting {name}_file: {path} is empty")
    return text


def _state(settings: Settings) -> State:
    """Return the state of this server, or of all replicas.

    Raises StartupError for a URL that cannot be read, or if the package for it is missing.
    """
    n_bytes, url = int(settings.stored_responses_memory), secret_of(settings, "state_url")
    if url is None:
        return MemoryState(n_bytes)
    with needed("state_url", "redis"):
        from kvasir.server.state.redis_state import RedisState  # noqa: PLC0415  imports redis
    return RedisState(url, n_bytes)


def _tracing() -> Any:
    """Return the module of spans. Raises StartupError if packages for it are missing."""
    with needed("otlp_endpoint", "otel"):
        from kvasir.server.process import tracing  # noqa: PLC0415  imports opentelemetry
    return tracing


def _add_middleware(app: FastAPI, keys: ApiKeys) -> None:
    """Add what runs inside the request's context, in reverse order: the last is the outermost."""
    settings: Settings = app.state.models.settings
    app.add_middleware(body_limit, settings=settings)
    if settings.has_keys:
        app.add_middleware(key_check, keys=keys)
    else:
        app.add_middleware(page_check, settings=settings)
    app.add_middleware(error_responses)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                *("x-request-id", "request-id", "retry-after", "x-should-retry"),
                *("x-kvasir-ignored", "x-kvasir-scores"),
            ],
        )


def _flush(shut_down: Callable[[], None]) -> None:
    """Send the last spans. A daemon, because an exporter tries long to reach no collector."""
    flushing = Thread(target=shut_down, name="last spans", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)


@asynccontextmanager
async def _answering(batches: BatchWorker | None) -> AsyncIterator[None]:
    """Answer batches, if they are served, until the block is left."""
    if batches is not None:
        batches.start()
    yield
    if batches is not None:
        await batches.close()
        batches.store.close()


def _batch_worker(app: FastAPI, keys: ApiKeys | None, state: State) -> BatchWorker | None:
    """Return what answers the batches of an application; None if it serves none."""
    models: ModelRegistry = app.state.models
    settings, metrics = models.settings, models.metrics
    if settings.batch_dir is None:
        return None
    make_store: Callable[..., BatchStore] = BatchStore
    make_worker: type[BatchWorker] = BatchWorker
    if not isinstance(state, MemoryState):
        shared: Any = state
        make_store, make_worker = partial(SharedStore, shared), SharedWorker
    store = make_store(
        settings.batch_dir,
        max_bytes=settings.batch_dir_bytes,
        is_shared=settings.api_key_file is not None,
    )
    worker = make_worker(
        store,
        Answers(app, keys),
        parse_line,
        n_at_once=max(served.settings.max_num_seqs for served in models.served.values()),
        max_line=settings.max_body_bytes,
        count=metrics.batch_request,
    )
    metrics.show_batches(
        lambda: (worker.n_pending, len(worker.waiting), store.n_bytes, settings.batch_dir_bytes),
        lambda: worker.n_unfinished,
    )
    return worker
