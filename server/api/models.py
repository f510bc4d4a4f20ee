"""The models that are served: as OpenAI lists them, and everything about each."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import Field

from kvasir.model.directory import ATTENTION_GRAPH_FILE
from kvasir.server.api.explain.routes import MAX_WEIGHTS
from kvasir.server.api.http.responses import (
    MODEL_ERRORS,
    NamedModel,
    errors,
    models_of,
)
from kvasir.server.api.schemas import ResponseBody, Size
from kvasir.server.engine.engine import Engine
from kvasir.server.errors import InvalidRequestError
from kvasir.server.explain.explanation import most_tokens
from kvasir.server.requests.adapters.served import AdaptedModel
from kvasir.server.requests.registry import ModelRegistry, ModelState
from kvasir.server.requests.served_model import Kind, ServedModel
from kvasir.server.requests.target import languages

router = APIRouter()

AnthropicVersion = Annotated[str | None, Header(description="Asks for Anthropic's form.")]


class Model(ResponseBody, json_schema_serialization_defaults_required=True):
    """A model, as OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvasir"] = "kvasir"
    max_model_len: Size
    max_source_len: Size | None = None
    root: str = Field(description="An adapter's model; of a model its own name.")
    parent: str | None = Field(description="The model that an adapter is of; null for models.")
    state: ModelState = Field(description="A request loads one that is unloaded.")
    size: Size = Field(description="Bytes of its files.")
    kind: Kind = Field(
        description="The model's use: complete is a decoder without a chat template, translate an "
        "encoder-decoder, rank an encoder with one label, classify one with several."
    )


class Models(ResponseBody, json_schema_serialization_defaults_required=True):
    """The list of models."""

    object: Literal["list"] = "list"
    data: list[Model]


class AnthropicModel(ResponseBody, json_schema_serialization_defaults_required=True):
    """A model, as Anthropic lists it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str = Field(description="In RFC 3339.")
    max_input_tokens: Size
    max_tokens: Size


class AnthropicModels(ResponseBody):
    """A page of models, if the request has the header `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelFile(ResponseBody):
    """A file of the model directory."""

    name: str
    sha256: str
    bytes: Size | None = Field(description="null if the file has been removed since the start.")


class KVCache(ResponseBody):
    """The size of the KV cache."""

    bytes_per_token: Size = Field(description="Of keys and values, in all layers.")
    prompt_bytes_per_token: Size = Field(description="As much again, while a prompt is computed.")
    budget_tokens: Size = Field(description="Number of tokens that fit in memory.")
    state_bytes_per_sequence: Size = Field(description="Of recurrent layers, whatever the length.")


class ExplainLimits(ResponseBody):
    """The limits of /explain."""

    max_tokens: Size = Field(description="Of a text.")
    max_weights: Size = Field(
        description="Of an answer: heads of all layers, times tokens squared."
    )


class ModelCard(ResponseBody):
    """Everything about the model but its weights."""

    model: str
    precision: str
    device: str
    parameters: Size
    max_model_len: Size = Field(
        description="Maximum number of tokens of prompt and completion or, with an encoder, of a "
        "target."
    )
    max_source_len: Size | None = Field(
        description="Maximum number of tokens of an encoder-decoder's source; null for others."
    )
    target_languages: list[str] = Field(
        description="Values of `target_language` and `source_language`."
    )
    max_num_seqs: Size
    kv_cache: KVCache | None = Field(description="null until the model is loaded.")
    has_chat_template: bool
    has_attention: bool = Field(description="Whether `/explain` is available.")
    explain_limits: ExplainLimits | None = Field(description="null if `/explain` is switched off.")
    config: dict[str, Any] = Field(description="The model's shape: its config.json.")
    generation: dict[str, int | float] = Field(description="The model's recommended sampling.")
    examples: list[str] = Field(description="Prompts to try it with, held out of its training.")
    verification: dict[str, Any] = Field(
        description="Measured at export: ONNX Runtime against PyTorch."
    )
    versions: dict[str, str]
    source: dict[str, Any] = Field(description="The origin of the model that was exported.")
    files: list[ModelFile]


@router.get("/v1/models", responses=errors(400, 401, 403, 429))
def models(  # no coroutine: it asks the file system
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of a page, in Anthropic's form.")] = 20,
    after_id: Annotated[str | None, Query(description="The last model before the page.")] = None,
    before_id: Annotated[str | None, Query(description="The first model after the page.")] = None,
    anthropic_version: AnthropicVersion = None,
) -> Models | AnthropicModels:
    """List the models, without those that could not be loaded. Anthropic's with its header."""
    found = models_of(request.scope)
    models = [*found.usable, *found.adapters]
    if anthropic_version is None:
        return Models(data=[listed(served, found) for served in models])
    names = [served.name for served in models]
    start = 0 if after_id is None else _place(names, after_id, "after_id") + 1
    end = len(names) if before_id is None else _place(names, before_id, "before_id")
    start = start if before_id is None else max(start, end - limit)
    page = models[start:end][:limit]
    return AnthropicModels(
        data=list(map(_listed_by_anthropic, page)),
        has_more=start > 0 if before_id is not None else start + limit < end,
        first_id=page[0].name if page else None,
        last_id=page[-1].name if page else None,
    )


@router.get("/v1/models/{model_id:path}", responses=errors(401, 403, 404))
def model(  # as above
    request: Request,
    model_id: Annotated[str, Path(json_schema_extra={"minLength": 1})],
    anthropic_version: AnthropicVersion = None,
) -> Model | AnthropicModel:
    """Return the model by its name."""
    found = models_of(request.scope)
    served = found.named(model_id)
    return listed(served, found) if anthropic_version is None else _listed_by_anthropic(served)


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequestError(f"{param}: {name[:100]!r} is no model here", param=param)
    return names.index(name)


def _listed_by_anthropic(served: ServedModel) -> AnthropicModel:
    return AnthropicModel(
        id=served.name,
        display_name=served.name,
        created_at=datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=served.builder.max_model_len,
        max_tokens=served.builder.max_model_len,
    )


def listed(served: ServedModel, models: ModelRegistry) -> Model:
    """Return a model as OpenAI lists it."""
    parent = served.parent.name if isinstance(served, AdaptedModel) else None
    state = models.states[parent or served.name]
    if models.bank is not None and parent and served.name not in models.bank.loaded:
        state = "unloaded" if state == "ready" else state
    return Model(
        id=served.name,
        created=served.created,
        max_model_len=served.builder.limits.max_model_len,
        max_source_len=served.builder.limits.max_source_len,
        root=served.name if parent is None else parent,
        parent=parent,
        state=state,
        size=size_of(served),
        kind=served.kind,
    )


@router.get("/model", responses=MODEL_ERRORS)
def model_card(served: NamedModel) -> ModelCard:  # as above
    """Return the model's shape, precision, verification and files."""
    model_dir = served.model_dir
    manifest, limits = model_dir.manifest, served.builder.limits
    engine = served.engine.engine
    explain_limits = None
    if served.settings.explain:
        most = most_tokens(model_dir.config)
        explain_limits = ExplainLimits(max_tokens=most, max_weights=MAX_WEIGHTS)
    files = [
        ModelFile(name=name, sha256=digest, bytes=file_size(model_dir.path / name))
        for name, digest in manifest.files.items()
    ]
    return ModelCard(
        **served.describe_model(),
        parameters=manifest.parameters,
        max_model_len=limits.max_model_len,
        max_source_len=limits.max_source_len,
        target_languages=sorted(languages(model_dir.tokenizer)) if model_dir.config.encoder else [],
        max_num_seqs=served.settings.max_num_seqs,
        kv_cache=KVCache(**engine.kv.sizes) if isinstance(engine, Engine) else None,
        has_chat_template=served.chat is not None,
        has_attention=explain_limits is not None and ATTENTION_GRAPH_FILE in manifest.files,
        explain_limits=explain_limits,
        config=asdict(model_dir.config),
        generation=model_dir.default_sampling.given(),
        examples=list(model_dir.examples),
        verification=manifest.verification.model_dump()
        | {"verdict": manifest.verification.verdict},
        versions=manifest.versions,
        source=manifest.source,
        files=files,
    )


def size_of(served: ServedModel) -> int:
    """Return the bytes of a model's files."""
    path, files = served.model_dir.path, served.model_dir.manifest.files
    return sum(file_size(path / name) or 0 for name in files)


def file_size(path: FilePath) -> int | None:
    """Return a file's size; None if it has been removed since it was read at the start."""
    try:
        return path.stat().st_size
    except OSError:
        return None
