"""GET / and /static/…: a page on which the served model can be tried and seen, from files beside this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent.parent / "static"
# The page loads nothing from elsewhere, runs no inline script, and nobody may put it in a frame.
_POLICY = "; ".join(
    (
        *(
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
        ),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked again each time, and answered with 304: never yesterday's script
}

router = APIRouter()


@router.head("/", operation_id="head /")
@router.get("/", operation_id="get /")
async def page() -> Response:
    return FileResponse(STATIC / "index.html", headers=HEADERS)


class StaticPlayground(StaticFiles):
    """What the page is made of."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response
