"""The example's model, in int8, in a server of this process with a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvasir.model.directory import load_model_dir
from kvasir.server.process import engine_builder
from kvasir.server.process.app import create_app
from kvasir.server.requests.registry import ModelRegistry
from kvasir.server.settings import load_settings
from kvasir.server.telemetry.start_clock import StartClock

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"


@asynccontextmanager
async def serving(
    *names: str, **options: Any
) -> AsyncIterator[tuple[ModelRegistry, httpx.AsyncClient]]:
    """Serve the example under some names, or its own; the library is looked for anew."""
    engine_builder._find_library.cache_clear()
    names = names or (EXAMPLE.name,)
    options = {"threads": 1, "kv_cache_memory": 2**24, "max_num_seqs": 2} | options
    settings = load_settings(model=",".join(f"{name}={EXAMPLE}" for name in names), **options)
    app = create_app(settings, dict.fromkeys(names, load_model_dir(EXAMPLE)))
    models: ModelRegistry = app.state.models
    await models.start(
        lambda served, _: engine_builder.build_engine(served.settings, served.model_dir),
        StartClock(),
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield models, client
    await models.close()
