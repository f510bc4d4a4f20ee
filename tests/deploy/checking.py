"""Common parts of the checks: their results, the tools that they need, and the rendered chart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "registry.example.com/kvasir"
# PyYAML comes with libyaml on most systems, which is ten times as fast as its own Python.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SkippedError(Exception):
    """A check that cannot run here, and the reason."""


class FailedError(Exception):
    """A failed check, and the reason."""


class RenderError(Exception):
    """An error message of Helm."""


def parse_all(text: str) -> list[Any]:
    """Return the documents of a text of YAML."""
    return list(yaml.load_all(text, _LOADER))


def parse(text: str) -> Any:
    """Return the only document of a text of YAML."""
    return yaml.load(text, _LOADER)  # noqa: S506  a safe one


def load(path: Path) -> dict[str, Any]:
    return parse(path.read_text(encoding="utf-8")) or {}


def run_tool(package: str, program: str, *arguments: str | Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(program, path=path)
    if found is None:
        raise SkippedError(f"{program} is missing; it comes with {package}")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{program}: {done.stdout}{done.stderr}".strip())


def server_url() -> str:
    url = os.environ.get("KVASIR_URL")
    if not url:
        raise SkippedError("KVASIR_URL is not set to a running server")
    return url


def fail_on_first(found: Iterator[str], place: str = "") -> None:
    for fault in found:
        raise FailedError(place + fault)


def rendered(root: Path, values: dict[str, Any], release: str = "kvasir") -> list[dict[str, Any]]:
    """Render the chart, its test too, with values and, unless they have one, an image.

    Raises RenderError.
    """
    import helm_python  # noqa: PLC0415

    image = {"repository": IMAGE} | values.get("image", {})
    try:
        texts = helm_python.Chart.load(root / "helm").render(
            values | {"image": image}, name=release, namespace="default"
        )
    except helm_python.HelmError as error:
        raise RenderError(str(error).strip()) from None
    yamls = (text for path, text in texts.items() if path.endswith(".yaml"))
    return [document for text in yamls for document in parse_all(text) if document]
