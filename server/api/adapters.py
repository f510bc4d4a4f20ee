"""The routes that load and unload adapters while the server runs, by vLLM's names.

They are served where `adapter_admin_key` is set, which they alone take.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from kvasir.model.adapters.config import AdapterError
from kvasir.server.api.http.body import admin_route
from kvasir.server.api.http.responses import errors, models_of
from kvasir.server.api.schemas import RequestBody
from kvasir.server.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from kvasir.server.requests.adapters.adapted_models import AdaptedModels
from kvasir.server.requests.adapters.served import graph_of

router = APIRouter(route_class=admin_route("adapter_admin_key"))

_ERRORS = errors(400, 401, 403, 404, 413)
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s/][^\s]*$")]


class LoadAdapterBody(RequestBody):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: _Name = Field(description="The id in the API, which no model and adapter has.")
    lora_path: str = Field(
        min_length=1, description="The folder, below the setting `adapter_dir`; relative to it."
    )
    base_model_name: str = Field(
        "", description="The id of its model. Default: the one that it names, or that it fits."
    )


class UnloadAdapterBody(RequestBody):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: _Name = Field(description="The adapter's id.")


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
async def load_adapter(request: Request, body: LoadAdapterBody) -> PlainTextResponse:
    """Load an adapter under a new name, as vLLM does; running streams go on."""
    adapted, name, models = _adapted(request), body.lora_name, models_of(request.scope)
    if (folder := adapted.bank.inside(body.lora_path)) is None:
        message = "lora_path: it is not below the folder of adapters (setting adapter_dir)"
        raise InvalidRequestError(message, param="lora_path")
    if name in models.names or adapted.bank.find(name) not in (None, folder):
        message = f"lora_name: {name!r} is served already; unload it first, or choose another"
        raise InvalidRequestError(message, param="lora_name")
    try:
        model = await asyncio.to_thread(adapted.choose, name, folder, body.base_model_name)
    except AdapterError as error:
        param = "base_model_name" if body.base_model_name else "lora_path"
        raise InvalidRequestError(str(error), param=param) from None
    async with models.loader.hold(model) if model in models.loader.names else nullcontext():
        await adapted.bank.add(name, folder, graph_of(models.named(model)), model)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
async def unload_adapter(request: Request, body: UnloadAdapterBody) -> PlainTextResponse:
    """Forget an adapter, as vLLM does. Requests that have begun keep it until they end."""
    bank, name = _adapted(request).bank, body.lora_name
    if bank.find(name) is None:
        message = f"the adapter {name!r} is not served here"
        raise ModelNotFoundError(message, param="lora_name")
    bank.remove(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _adapted(request: Request) -> AdaptedModels:
    if (adapted := models_of(request.scope).adapted) is None:
        message = "the model of the adapters cannot be loaded; the server's log says why"
        raise UnavailableError(message, retry_after=60)
    return adapted
