"""The served models as Ollama lists them: /api/tags, /api/ps, /api/show and /api/version."""

from __future__ import annotations

from hashlib import sha256
from operator import attrgetter
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvasir.server.api.http.body import BodyRoute
from kvasir.server.api.http.pieces import held_response
from kvasir.server.api.http.responses import BODY_ERRORS, READ_ERRORS, models_of, served_model
from kvasir.server.api.models import size_of
from kvasir.server.api.ollama.formatting import utc
from kvasir.server.api.ollama.schemas import ShowBody
from kvasir.server.api.schemas import ResponseBody, Size
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.fill_in_middle import form_of

router = APIRouter(route_class=BodyRoute)

Capability = Literal["completion", "embedding", "tools", "thinking", "insert"]
# Of models that stay loaded, or are used now.
_NEVER = utc(253_370_764_800)  # in the year 9999
_AS_OLLAMA = "0.12.6"  # whose routes these are; some clients refuse versions below 0.6.4
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
    size: Size = Field(
        description="Bytes of its files; in /api/ps of the memory of a model of `models_dir`."
    )
    digest: str = Field(description="SHA-256 of its manifest.")
    details: ModelDetails
    expires_at: str = Field(description="When it is unloaded; far away if it stays or is used.")
    size_vram: Size = Field(description="Bytes on a GPU.")
    context_length: Size


class OllamaModels(ResponseBody):
    """The response of /api/tags, and of /api/ps."""

    models: list[OllamaModel]


class ShownModel(ResponseBody):
    """The response of /api/show."""

    modelfile: Literal[""] = ""
    parameters: str = Field(description="The recommended sampling, one a line.")
    template: str = Field(description="The chat template, in Jinja.")
    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]


class OllamaVersion(ResponseBody):
    """The response of /api/version."""

    version: str = Field(description="Of Ollama, whose API this is; Kvasir's is in /version.")


@router.head("/api/tags", responses=READ_ERRORS)
@router.get("/api/tags", responses=READ_ERRORS)
def tags(request: Request) -> OllamaModels:  # no coroutine: it asks the file system
    """List the models, as Ollama does."""
    found = models_of(request.scope)
    models = sorted([*found.usable, *found.adapters], key=attrgetter("name"))
    return OllamaModels(models=list(map(_listed, models)))


@router.get("/api/ps", responses=READ_ERRORS)
def loaded(request: Request) -> OllamaModels:  # as above
    """List the models that are loaded, as Ollama does."""
    found = models_of(request.scope)
    models = [_listed(one) for one in found.served.values() if one.engine.engine]
    for one in models:
        if (name := one.name.removesuffix(":latest")) in found.loader.names:
            one.size = found.loader.need(name).kept
            if (expires_at := found.loader.expires_at(name)) is not None:
                one.expires_at = utc(expires_at)
    return OllamaModels(models=models)


@router.post("/api/show", response_model=ShownModel, responses=BODY_ERRORS)
async def show(request: Request, body: ShowBody) -> Response:  # noqa: ARG001
    """Return a model's template, sampling, shape and abilities, as Ollama does."""
    served = served_model(request)
    model_dir, config = served.model_dir, served.model_dir.config
    family = model_dir.manifest.architecture
    sizes = {
        "context_length": served.builder.limits.max_model_len,
        "embedding_length": config.d_model,
        "block_count": config.n_layer,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head,
    }
    info: dict[str, Any] = {"general.architecture": family, "general.basename": served.name}
    info |= {f"{family}.{k}": n for k, n in sizes.items()}
    shown = ShownModel(
        parameters="\n".join(f"{k} {n}" for k, n in model_dir.default_sampling.given().items()),
        template=model_dir.chat_template or "",
        modified_at=utc(served.created),
        details=_details(served),
        model_info=info | {"general.parameter_count": model_dir.manifest.parameters},
        capabilities=_capabilities(served),
    )
    return held_response(shown.model_dump_json().encode(), served)


@router.head("/api/version", responses=READ_ERRORS)
@router.get("/api/version", responses=READ_ERRORS)
async def versions() -> OllamaVersion:
    """Return the version of Ollama that knows these routes: clients refuse old ones."""
    return OllamaVersion(version=_AS_OLLAMA)


def _details(served: ServedModel) -> ModelDetails:
    manifest, n = served.model_dir.manifest, served.model_dir.manifest.parameters
    unit, sign = next(((unit, sign) for unit, sign in _UNITS if n >= unit), (1, ""))
    return ModelDetails(
        family=manifest.architecture,
        families=[manifest.architecture],
        parameter_size=f"{n / unit:.3g}{sign}",
        quantization_level=manifest.precision,
    )


def _listed(served: ServedModel) -> OllamaModel:
    manifest, size = served.model_dir.manifest, size_of(served)
    name = served.name if ":" in served.name else f"{served.name}:latest"
    return OllamaModel(
        name=name,
        model=name,
        modified_at=utc(served.created),
        size=size,
        digest=sha256(manifest.model_dump_json().encode()).hexdigest(),
        details=_details(served),
        expires_at=_NEVER,
        size_vram=0 if manifest.device == "cpu" else size,
        context_length=served.builder.limits.max_model_len,
    )


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
