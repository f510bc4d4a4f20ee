"""The server as a deployment of Ray Serve, which counts its replicas, restarts and routes to them.

serve run kvasir.integrations.ray:app model=DIR max_num_seqs=32

The arguments are settings of `kvasir serve`; `Kvasir.options(…).bind(…)` takes both them and the
options of a deployment. A replica has as many threads as `num_cpus`, and as large a part of the
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from kvasir.integrations.node_share import of_this_node
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import check_model
from kvasir.server.settings import Settings, load_settings

_GRACE = 15.0  # seconds to the end of a replica after the longest stream may take
_MOST_ONGOING = 10_000  # requests; the replica itself refuses what it has no room for


@serve.deployment(
    max_ongoing_requests=_MOST_ONGOING,
    graceful_shutdown_timeout_s=Settings.model_fields["drain_timeout"].default + _GRACE,
)
@serve.ingress()
class Kvasir:
    """A replica: ready once its models are loaded, ended once its streams have.

    Raises StartupError for settings or models that cannot be served.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        given = load_settings(model=[model], **settings)
        self.settings = of_this_node(given)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, in the replica."""
        settings = self.settings
        models = {name: check_model(settings, name) for name in settings.models}
        application = create_app(settings, models)
        begin = application.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with begin(app):
                await app.state.loading
                for error in app.state.models.failures.values():
                    raise error
                yield

        application.router.lifespan_context = lifespan
        self.models = application.state.models
        return application

    def check_health(self) -> None:
        """Let Serve replace a replica whose engine failed. Raises RuntimeError for one."""
        if "unhealthy" in self.models.states.values():
            raise RuntimeError("an engine has failed or hangs; its log says why")


def app(settings: dict[str, Any]) -> Application:
    """Return the application for `serve run` and configuration files."""
    return Kvasir.bind(**settings)
