"""The served models as Ollama lists them: /api/tags, /api/ps, /api/show and /api/version."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.http.pieces import held_response
from kvasir.server.api.http.responses import BODY_ERRORS, READ_ERRORS, models_of, served_model
from kvasir.server.api.models import file_size
from kvasir.server.api.ollama.formatting import utc
from kvasir.server.api.ollama.schemas import ShowBody
from kvasir.server.api.schemas import ResponseBody, Size
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.fill_in_middle import form_of

router = APIRouter(route_class=BodyRoute)

Capability = Literal["completion", "embedding", "tools", "thinking", "insert"]
# Models stay loaded: clients that show the time until one is unloaded get one that is far away.
_NEVER = utc(datetime(9999, 1, 1, tzinfo=UTC))
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


class ModelDetails(ResponseBody):
    """The kind of a model."""

    parent_model: Literal[""] = ""
    format: Literal["onnx"] = "onnx"
    family: str
    families: list[str]
    parameter_size: str = Field(description="Such as 135M.")
    quantization_level: str


class OllamaModel(ResponseBody):
    """A model in a list; its name has a tag."""

    name: str
    model: str
    modified_at: str = Field(description="When the server started, in RFC 3339.")
    size: Size = Field(description="Bytes of its files.")
    digest: str = Field(description="SHA-256 of its manifest.")
    details: ModelDetails


class LoadedModel(OllamaModel):
    """A model that is loaded."""

    expires_at: str = Field(description="Far away: models stay loaded.")
    size_vram: Size = Field(description="Bytes on a GPU.")
    context_length: Size


class OllamaModels(ResponseBody):
    """The response of /api/tags."""

    models: list[OllamaModel]


class LoadedModels(ResponseBody):
    """The response of /api/ps."""

    models: list[LoadedModel]


class ShownModel(ResponseBody):
    """The response of /api/show."""

    modelfile: str
    parameters: str = Field(description="The recommended sampling, one a line.")
    template: str = Field(description="The chat template, in Jinja.")
    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]


class OllamaVersion(ResponseBody):
    """The response of /api/version."""

    version: str = Field(description="Kvasir's.")


@router.get("/api/tags", responses=READ_ERRORS)
def tags(request: Request) -> OllamaModels:  # no coroutine: it asks the file system
    """List the models, as Ollama does."""
    models = [OllamaModel(**_listed(served)) for served in _loadable(request)]
    return OllamaModels(models=models)


@router.get("/api/ps", responses=READ_ERRORS)
def loaded(request: Request) -> LoadedModels:
    """List the models that are loaded, as Ollama does."""
    models = []
    for served in _loadable(request):
        if served.engine.engine is not None:
            fields = _listed(served)
            on_gpu = fields["size"] if served.model_dir.manifest.device != "cpu" else 0
            length = served.builder.limits.max_model_len
            fields |= {"expires_at": _NEVER, "size_vram": on_gpu, "context_length": length}
            models.append(LoadedModel(**fields))
    return LoadedModels(models=models)


@router.post("/api/show", response_model=ShownModel, responses=BODY_ERRORS)
async def show(request: Request, body: ShowBody) -> Response:  # noqa: ARG001
    """Return a model's template, sampling, shape and abilities, as Ollama does."""
    served = served_model(request)
    model_dir, listed = served.model_dir, _described(served)
    config, family = model_dir.config, model_dir.manifest.architecture
    info = {
        "general.architecture": family,
        "general.parameter_count": model_dir.manifest.parameters,
        f"{family}.context_length": served.builder.limits.max_model_len,
        f"{family}.embedding_length": config.d_model,
        f"{family}.block_count": config.n_layer,
        f"{family}.attention.head_count": config.n_head,
        f"{family}.attention.head_count_kv": config.n_kv_head,
    }
    sampling = model_dir.default_sampling.given()
    shown = ShownModel(
        modelfile="",
        parameters="\n".join(f"{name} {value}" for name, value in sampling.items()),
        template=model_dir.chat_template or "",
        modified_at=listed["modified_at"],
        details=listed["details"],
        model_info=info,
        capabilities=_capabilities(served),
    )
    return held_response(shown.model_dump_json().encode(), served)


@router.get("/api/version", responses=READ_ERRORS)
async def versions() -> OllamaVersion:
    """Return the version, as Ollama does."""
    return OllamaVersion(version=version("kvasir-lm"))


def _loadable(request: Request) -> list[ServedModel]:
    registry = models_of(request.scope)
    return [served for name, served in registry.served.items() if name not in registry.failures]


def _described(served: ServedModel) -> dict[str, Any]:
    manifest = served.model_dir.manifest
    family = manifest.architecture
    details = ModelDetails(
        family=family,
        families=[family],
        parameter_size=_in_words(manifest.parameters),
        quantization_level=manifest.precision,
    )
    return {"modified_at": utc(datetime.fromtimestamp(served.created, UTC)), "details": details}


def _listed(served: ServedModel) -> dict[str, Any]:
    model_dir = served.model_dir
    name = served.name if ":" in served.name else f"{served.name}:latest"
    sizes = (file_size(model_dir.path / file) for file in model_dir.manifest.files)
    return _described(served) | {
        "name": name,
        "model": name,
        "size": sum(size or 0 for size in sizes),
        "digest": sha256(model_dir.manifest.model_dump_json().encode()).hexdigest(),
    }


def _capabilities(served: ServedModel) -> list[Capability]:
    if served.task != "generate":
        return ["embedding"] if served.task == "embed" else []
    chat = served.chat
    able: dict[Capability, bool] = {
        "completion": True,
        "tools": chat is not None and chat.tool_calls is not None,
        "thinking": chat is not None and chat.reasoning is not None,
        "insert": form_of(served.added_ids) is not None,
    }
    return [name for name, is_able in able.items() if is_able]


def _in_words(n: int) -> str:
    """Return a number of parameters as 1.1B, 135M or 12K."""
    unit, sign = next(((unit, sign) for unit, sign in _UNITS if n >= unit), (1, ""))
    return f"{n / unit:.3g}{sign}"
