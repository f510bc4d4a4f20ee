"""OpenAI's model routes: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.api.openai import check_model
from server.api.responses import service_of
from server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(service_of(request))]}


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> dict[str, Any]:
    service = service_of(request)
    check_model(service, model_id, others=())
    return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvasir",
        "max_model_len": service.max_model_len,
    }
