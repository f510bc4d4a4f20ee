"""GET /, /docs and /static/…: a page to try the served model, and one that lists the routes.

Their files are plain ES modules and stylesheets. So that a first load takes few requests, page.js
and page.css join them, once in a process: a module is a function that returns its exports, and
modules that it imports come before it.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from kvasir.server.api.http.responses import OPEN, errors

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

_TYPES = {"page.js": "text/javascript", "page.css": "text/css"}
_compressed = cache(gzip.compress)
_WEIGHT = re.compile(r"q=([01](?:\.\d{0,3})?)")

_IMPORT = re.compile(r'^import (\{[^}]*\}|\* as \w+) from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)

router = APIRouter()
_OPEN = OPEN | {"responses": errors(403)}


@router.head("/", response_class=HTMLResponse, **_OPEN)
@router.get("/", response_class=HTMLResponse, **_OPEN)
async def page() -> Response:
    """Return the playground, or its headers."""
    return FileResponse(STATIC / "index.html", headers=HEADERS)


@router.head("/docs", response_class=HTMLResponse, **_OPEN)
@router.get("/docs", response_class=HTMLResponse, **_OPEN)
async def reference() -> Response:
    """Return the page of the API reference, or its headers."""
    return FileResponse(STATIC / "docs.html", headers=HEADERS)


class StaticPlayground(StaticFiles):
    """The files of the page, and page.js and page.css, which join them."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or what joins several, compressed for clients that accept that."""
        if scope["method"] not in ("GET", "HEAD") or path not in ("page.css", "page.js"):
            return await super().get_response(path, scope)
        body = joined(path)
        asked = Headers(scope=scope)
        tag = hashlib.sha256(body).hexdigest()
        headers = HEADERS | {"vary": "accept-encoding"}
        if _takes_gzip(",".join(asked.getlist("accept-encoding"))):
            body = _compressed(body)
            tag += "-gzip"
            headers |= {"content-encoding": "gzip"}
        headers |= {"etag": f'"{tag}"'}
        response = Response(body, headers=headers, media_type=_TYPES[path])
        if self.is_not_modified(response.headers, asked):
            return NotModifiedResponse(response.headers)
        return response

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file with the page's headers."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def _takes_gzip(accepted: str) -> bool:
    """Return whether gzip is accepted and wanted no less than plain bytes (RFC 9110, 12.5.3)."""
    weights = {"*": 0.0}
    for coding in accepted.lower().split(","):
        name, _, weight = (part.strip() for part in coding.partition(";"))
        fit = _WEIGHT.fullmatch(weight or "q=1")
        weights[name] = float(fit[1]) if fit else 0.0
    gzip_weight = weights.get("gzip", weights["*"])
    return 0 < gzip_weight >= weights.get("identity", weights["*"])


@cache
def joined(name: Literal["page.css", "page.js"]) -> bytes:
    """Return all stylesheets, or all modules."""
    if name == "page.css":
        paths = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.css")]
        paths.sort(key=lambda path: (path != "base.css", path))  # what all views share comes first
        return "".join(map(_text, paths)).encode()
    modules: dict[str, str] = {}
    _add("app.js", modules)
    return "".join(modules.values()).encode()


def _text(path: str) -> str:
    return (STATIC / path).read_text(encoding="utf-8")


def _add(path: str, modules: dict[str, str]) -> None:
    """Add a module to `modules`, functions by path, after those that it imports."""
    text, imports = _text(path), []
    for names, where in _IMPORT.findall(text):
        other = posixpath.normpath(posixpath.join(posixpath.dirname(path), where))
        if other not in modules:
            _add(other, modules)
        bound = names.replace(" as ", ": ") if names.startswith("{") else names[len("* as ") :]
        imports.append(f"const {bound} = {_variable(other)};\n")
    exports = ", ".join(name for _, name in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub("", text))
    modules[path] = (
        f"// {path}\nconst {_variable(path)} = (() => {{\n"
        f"{''.join(imports)}{body}return {{ {exports} }};\n}})();\n"
    )


def _variable(path: str) -> str:
    """Return a name for a module's exports that no module uses itself."""
    return "$" + re.sub(r"\W", "$", path.removesuffix(".js"))
