"""The one model that is served: as OpenAI lists it, and its whole card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from model.bundle import ATTENTION_GRAPH_FILE
from server.api.explain import MAX_WEIGHTS
from server.api.openai.answers import check_model
from server.api.responses import service_of
from server.explain import most_tokens
from server.requests.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_listed(service_of(request))]}


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> dict[str, Any]:
    service = service_of(request)
    check_model(service, model_id, others=())
    return _listed(service)


@router.get("/model")
def model_card(request: Request) -> dict[str, Any]:
    """Everything about the model but its weights. Not a coroutine: it asks the file system."""
    service = service_of(request)
    bundle = service.bundle
    manifest = bundle.manifest
    return {
        **service.describe_model(),
        "parameters": manifest.parameters,
        "max_model_len": service.max_model_len,
        "max_num_seqs": service.settings.max_num_seqs,
        "kv_cache": _kv_cache(service),
        "has_chat_template": service.chat is not None,
        "has_attention": ATTENTION_GRAPH_FILE in manifest.files,
        "explain_limits": {"max_tokens": most_tokens(bundle.config), "max_weights": MAX_WEIGHTS},
        "config": asdict(bundle.config),
        "generation": bundle.generation.given(),
        "verification": manifest.verification.model_dump(),
        "versions": manifest.versions,
        "source": manifest.source,
        "files": [
            {"name": name, "sha256": digest, "bytes": _size(bundle.path / name)}
            for name, digest in manifest.files.items()
        ],
    }


def _kv_cache(service: Service) -> dict[str, int] | None:
    engine = service.engine.engine
    if engine is None:
        return None
    rows = engine.kv
    return {
        "bytes_per_token": rows.token_bytes,
        "prompt_bytes_per_token": rows.prompt_token_bytes,
        "budget_tokens": rows.budget_tokens,
    }


def _size(path: Path) -> int | None:
    """None where the file can no longer be found: what is served was read from it at the start."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _listed(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvasir",
        "max_model_len": service.max_model_len,
    }
