"""The server as a deployment of Ray Serve: `serve run kvasir.integrations.ray:app model=DIR`.

The arguments are settings of `kvasir serve`.
"""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from kvasir.integrations.node_share import of_this_node
from kvasir.server.process.app import create_app
from kvasir.server.process.engine_builder import check_model
from kvasir.server.settings import load_settings


# A replica refuses what it has no room for, and ends its streams before it goes.
@serve.deployment(max_ongoing_requests=10_000, graceful_shutdown_timeout_s=60)
@serve.ingress()
class Kvasir:
    """A replica. Raises StartupError for settings or models that cannot be served."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.settings = of_this_node(load_settings(model=[model], **settings))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, in the replica."""
        models = {name: check_model(self.settings, name) for name in self.settings.models}
        self.built = create_app(self.settings, models)
        return self.built

    async def check_health(self) -> None:
        """Wait for the models: Serve asks before it calls a replica ready, and from then on.

        Raises RuntimeError for a replica that Serve should replace.
        """
        await self.built.state.loading
        if {"failed", "unhealthy"} & {*self.built.state.models.states.values()}:
            raise RuntimeError("an engine has failed or hangs; its log says why")


def app(settings: dict[str, Any]) -> Application:
    """Return the application for `serve run` and configuration files."""
    return Kvasir.bind(**settings)  # type: ignore[attr-defined]
