"""The routes that load and unload models of a folder, besides the requests that name them.

They are served where `models_admin_key` is set, which they alone take.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.server.api.http.body import admin_route
from kvasir.server.api.http.pieces import unless_disconnected
from kvasir.server.api.http.responses import errors, models_of
from kvasir.server.api.models import Model, listed
from kvasir.server.api.schemas import RequestBody
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.adapters.served import AdaptedModel
from kvasir.server.requests.loading.loader import ModelLoader

router = APIRouter(route_class=admin_route("models_admin_key"))

_ERRORS = errors(400, 401, 403, 404, 413)


class LoadModelBody(RequestBody):
    """The body of POST /v1/models/load and /v1/models/unload."""

    model: str = Field(min_length=1, description="A model of the setting `models_dir`.")


@router.post("/v1/models/load", response_model=Model, responses=_ERRORS)
async def load_model(request: Request, body: LoadModelBody) -> Response:
    """Load a model, also one that has failed before, and answer when it is loaded."""
    loader, name = _loader(request, body)
    await unless_disconnected(request.receive, loader.load(name))
    return _shown(request, name)


@router.post("/v1/models/unload", response_model=Model, responses=_ERRORS)
async def unload_model(request: Request, body: LoadModelBody) -> Response:
    """Unload a model, or let it go once the requests that use it have ended."""
    loader, name = _loader(request, body)
    await unless_disconnected(request.receive, loader.unload(name))
    return _shown(request, name)


def _loader(request: Request, body: LoadModelBody) -> tuple[ModelLoader, str]:
    """Return what loads models, and the name of one of those."""
    models = models_of(request.scope)
    served = models.named(body.model)
    if (name := served.name) not in models.loader.names:
        message = f"model: {name!r} is not of the folder models_dir, so it stays loaded"
        if isinstance(served, AdaptedModel):
            message = f"model: {name!r} is an adapter; name its model, {served.parent.name!r}"
        raise InvalidRequestError(message, param="model")
    return models.loader, name


def _shown(request: Request, name: str) -> Response:
    models = models_of(request.scope)
    shown = listed(models.served[name], models)
    return Response(shown.model_dump_json(), media_type="application/json")
