"""All routes, and GET /openapi.json, which describes them as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib.metadata import version
from threading import Lock
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvasir.server.api import adapters, health, loading, models, playground, tokenize
from kvasir.server.api.anthropic import messages
from kvasir.server.api.anthropic.schemas import AnthropicError
from kvasir.server.api.embeddings import cohere, tei, vllm
from kvasir.server.api.embeddings import openai as embeddings
from kvasir.server.api.explain import routes as explain
from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.http.middleware import ADMIN_PATHS, LOADING_PATHS
from kvasir.server.api.http.responses import (
    READ_ERRORS,
    TGI_PATHS,
    error_response,
    is_anthropic,
    is_ollama,
    path_of,
)
from kvasir.server.api.ollama import models as ollama_models
from kvasir.server.api.ollama import routes as ollama
from kvasir.server.api.ollama.schemas import OllamaError
from kvasir.server.api.openai import batches, chat, completions, files
from kvasir.server.api.openai.responses import routes as responses
from kvasir.server.api.schemas import Error
from kvasir.server.api.tgi import routes as tgi
from kvasir.server.api.tgi.schemas import GenerateError
from kvasir.server.errors import (
    InvalidRequestError,
    KvasirError,
    MethodNotAllowedError,
    NotFoundError,
)

router = APIRouter()
_DOCUMENTING = Lock()  # else each of many requests would make the first document

_REF = "#/components/schemas/{model}"
_UNDECLARED = (Error, GenerateError, AnthropicError, OllamaError, batches.BatchBody)
# Ollama's paths that change which models there are.
_OLLAMAS_STORE = tuple(
    f"/api/{word}" for word in ("pull", "push", "create", "copy", "delete", "blobs")
)
_STRING = {"required": True, "schema": {"type": "string"}}
_REQUEST_ID = _STRING | {"description": "The request's own, or a new one."}
_IGNORED = {
    "schema": {"type": "string"},
    "description": "Fields of the body that have no effect, comma-separated.",
}
_RETRY_AFTER = _STRING | {"description": "Seconds until it is worth trying again."}


@router.get("/openapi.json", responses=READ_ERRORS)
def openapi(request: Request) -> dict[str, Any]:  # no coroutine: it takes a while
    """Return the API as an OpenAPI document."""
    with _DOCUMENTING:
        return document(request.app)


ROUTERS = (
    # The busiest come first: a request is compared with each route before its own.
    *(chat.router, completions.router, embeddings.router),
    *(responses.router, messages.router, models.router, tgi.router, tokenize.router),
    *(cohere.router, tei.router, tei.pair_router, tei.label_router, cohere.pair_router),
    *(vllm.pair_router, vllm.router, vllm.label_router),
    *(ollama.router, ollama.vector_router, ollama_models.router),
    *(files.router, batches.router, adapters.router, loading.router),
    *(explain.router, health.router, playground.router, router),
)
ROUTES = [route for each in ROUTERS for route in each.routes if isinstance(route, APIRoute)]
_WITH_BODIES = [route.path for route in ROUTES if isinstance(route, BodyRoute)]
ENDPOINTS = [path for path in _WITH_BODIES if re.fullmatch("/v1/[a-z/]+", path)]  # of batches
for route in ROUTES:
    route.summary = route.description.partition("\n")[0]  # the docstring's first line


def add_routes(app: FastAPI) -> None:
    """Add all routes, and the responses for paths and methods that have none."""
    settings = app.state.models.settings
    absent = [] if settings.explain else [explain.router]
    absent += [files.router, batches.router] if settings.batch_dir is None else []
    absent += [adapters.router] if settings.adapter_admin_key is None else []
    absent += [loading.router] if settings.models_admin_key is None else []
    for each in ROUTERS:
        if not any(each is unserved for unserved in absent):
            app.router.routes += each.routes
    app.state.endpoints = ENDPOINTS
    app.mount("/static", playground.StaticPlayground(directory=playground.STATIC))
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_wrong_parameter)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    refusal: KvasirError = InvalidRequestError(str(error.detail))
    if error.status_code == 404:
        near = get_close_matches(path[:128], [route.path for route in ROUTES], 1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else "/docs lists the paths"
        refusal = NotFoundError(f"there is no {path} here; {hint}")
        if path_of(request.scope).startswith(_OLLAMAS_STORE):
            refusal = NotFoundError(
                "this server has the models that it was started with; `kvasir pull` fetches "
                "others, `kvasir serve` takes several, and `kvasir rm` removes them"
            )
        if path_of(request.scope).startswith(("/v1/files", "/v1/batches")):
            refusal = NotFoundError("batches are switched off on this server (setting batch_dir)")
        if path_of(request.scope) in ADMIN_PATHS:
            refusal = NotFoundError(
                "adapters are not loaded by requests on this server (setting adapter_admin_key)"
            )
        if path_of(request.scope) == "/explain":
            refusal = NotFoundError("/explain is switched off on this server (setting explain)")
    elif error.status_code == 405:
        refusal = MethodNotAllowedError(f"{path} does not take {request.method}")
        named = [route for route in ROUTES if route.path_regex.match(path)]
        methods = sorted({method for route in named for method in route.methods or ()})
        refusal.headers |= {"allow": ", ".join(methods)} if methods else dict(error.headers or {})
    is_served = request.app.state.models.settings.models_admin_key is not None
    if path_of(request.scope) in LOADING_PATHS and not is_served:  # else GET's 405
        message = "models are not loaded by name on this server (setting models_admin_key)"
        refusal = NotFoundError(message)
    return error_response(request.scope, refusal)


async def _on_wrong_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(request.scope, InvalidRequestError(f"{name}: {first['msg']}", param=name))


def _error_kinds(path: str, method: str) -> tuple[type[BaseModel], ...]:
    """Return the types of a route's errors."""
    if path in TGI_PATHS and method == "post":
        return (GenerateError,)
    if path.startswith("/v1/models"):
        return Error, AnthropicError
    if is_anthropic({"path": path}):
        return (AnthropicError,)
    return (OllamaError,) if is_ollama({"path": path}) else (Error,)


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application: FastAPI's, with what that cannot declare."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    settings = app.state.models.settings
    made = get_openapi(
        title="Kvasir",
        version=version("kvasir-lm"),
        description="Decoders, encoders and encoder-decoders, exported to ONNX.",
        routes=app.routes,
        servers=[{"url": settings.root_path or "/"}],
    )
    components = made["components"]
    _, more = models_json_schema([(kind, "validation") for kind in _UNDECLARED], ref_template=_REF)
    components["schemas"] |= more["$defs"]
    del components["schemas"]["HTTPValidationError"], components["schemas"]["ValidationError"]
    security: list[dict[str, list[str]]] = []
    if settings.has_keys:
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "x": header}
        security = [{"key": []}, {"x": []}]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = re.sub(r"\W+", "_", f"{method}{path}").strip("_")
            del operation["description"]
            operation.setdefault("security", security)
            kinds = _error_kinds(path, method)
            errors = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds]
            responses = operation["responses"]
            for absent in ("422", "403" if settings.has_keys else "401"):  # 422 is FastAPI's own
                responses.pop(absent, None)
            for status, response in responses.items():
                response["headers"] = {"x-request-id": _REQUEST_ID}
                if "requestBody" in operation:
                    response["headers"]["x-kvasir-ignored"] = _IGNORED
                if int(status) >= 400 and "content" not in response:
                    schema = {"anyOf": errors} if len(errors) > 1 else errors[0]
                    response["content"] = {"application/json": {"schema": schema}}
                    if status in ("429", "503"):
                        response["headers"]["retry-after"] = _RETRY_AFTER
    app.openapi_schema = made
    return made
