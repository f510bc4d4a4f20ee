"""GET / and /static/…: the playground, a page to try the served model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from server.api.http.responses import OPEN, errors

STATIC = Path(__file__).parent.parent / "static"
# The page loads nothing from other servers, runs no inline script, and cannot be framed.
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # revalidated each time, so that no old script is used
}

router = APIRouter()
_OPEN = OPEN | {"responses": errors(403)}


@router.head("/", response_class=HTMLResponse, **_OPEN)
@router.get("/", response_class=HTMLResponse, **_OPEN)
async def page() -> Response:
    """Return the playground, or its headers."""
    return FileResponse(STATIC / "index.html", headers=HEADERS)


class StaticPlayground(StaticFiles):
    """The files of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file with the page's headers."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response
