"""The page's modules joined into one, and its styles, so that a first load takes few requests.

The files themselves are plain ES modules and stylesheets, and are served too. Joined, once in a
process, a module is a function that returns its exports; modules that it imports come before it.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Literal

STATIC = Path(__file__).parent.parent / "static"

_IMPORT = re.compile(r'^import (\{[^}]*\}|\* as \w+) from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)


@cache
def joined(name: Literal["page.css", "page.js"]) -> bytes:
    """Return all stylesheets, or all modules."""
    if name == "page.css":
        return "".join(_text(path) for path in _stylesheets()).encode()
    modules: dict[str, str] = {}
    _add("app.js", modules)
    return "".join(modules.values()).encode()


def _stylesheets() -> list[str]:
    """Return the paths of the stylesheets: what all views share comes first."""
    found = (path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.css"))
    return sorted(found, key=lambda path: (path != "base.css", path))


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
