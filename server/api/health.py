"""Health, metrics and version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.api.responses import service_of
from server.requests.service import onnxruntime_version
from server.telemetry.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/health/live")
async def live(request: Request) -> Response:
    """Whether the process is of use: its engine has neither failed nor hung. A model that still loads is alive."""
    return _health(service_of(request).engine.is_healthy)


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Whether to send requests here. A full queue is ready: it answers, with 429."""
    return _health(service_of(request).is_ready)


@router.get("/health/startup")
async def startup(request: Request) -> Response:
    """Whether the model has been loaded and warmed up."""
    return _health(service_of(request).has_started)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/metrics/router")
async def router_metrics(request: Request) -> Response:
    return Response(
        service_of(request).metrics.render_load(), headers={"content-type": CONTENT_TYPE}
    )


@router.get("/version")
async def versions(request: Request) -> dict[str, Any]:
    service = service_of(request)
    return {
        "version": version("kvasir-lm"),
        "onnxruntime": onnxruntime_version(),
        **service.describe_model(),
        "speculate": service.settings.speculate,
    }


def _health(good: bool) -> Response:
    return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)
