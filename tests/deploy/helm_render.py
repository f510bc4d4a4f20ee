"""Render the chart without a cluster.

Uses `helm` if it is on the PATH, or else Helm's engine in PyPI's helm-sdkpy (Python 3.12 or newer).
That package can only install, so it installs into a minimal API server, which knows the kinds and
keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.shapes import SHAPES

# Kinds that the chart may emit, with their collections, by version; their versions are also the
# content of .Capabilities.APIVersions.
KINDS: dict[str, dict[str, str]] = {}
for _name in SHAPES["objects"]:
    _version, _, _kind = _name.rpartition("/")
    _plural = re.sub("ss$", "sse", re.sub("y$", "ie", _kind.lower())) + "s"
    KINDS.setdefault(_version, {})[_kind] = _plural
DEBUG_HINT = "Use --debug flag to render out invalid YAML"  # `helm` adds it to some errors
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class RenderError(Exception):
    """An error message of Helm."""


def render(chart: Path, values: dict[str, Any], release: str = "release") -> list[dict[str, Any]]:
    """Return every object of the chart with its test hooks. Raises RenderError."""
    engine = _by_command if shutil.which("helm") else _by_package
    text = engine(chart, values, release)
    return [document for document in yaml.safe_load_all(text) if document]


def _by_command(chart: Path, values: dict[str, Any], release: str) -> str:
    command = ["helm", "template", release, str(chart), "--values", "-"]
    for version in KINDS:
        command += ["--api-versions", version]
    done = subprocess.run(
        command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RenderError(done.stderr.strip().removesuffix(DEBUG_HINT).strip())
    return str(done.stdout)


def _by_package(chart: Path, values: dict[str, Any], release: str) -> str:
    import helm_sdkpy  # noqa: PLC0415

    with _api_server() as port, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kubeconfig"
        config.write_text(json.dumps(_kubeconfig(port)), encoding="utf-8")

        async def install() -> str:
            configuration = helm_sdkpy.Configuration(namespace="default", kubeconfig=str(config))
            installation = helm_sdkpy.Install(configuration)
            done = await installation.run(release, str(chart), values=values, wait=False)
            hooks = (hook["manifest"] for hook in done.get("hooks", ()))
            return "---\n".join([str(done["manifest"]), *hooks])

        try:
            return asyncio.run(install())
        except helm_sdkpy.HelmError as error:
            raise RenderError(str(error)) from None


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "c", "user": {}}],
    }  # fmt: skip


@contextmanager
def _api_server() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Api(BaseHTTPRequestHandler):
    """An API server with discovery and empty lists, which echoes created objects."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].rstrip("/")
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/version":
            self._answer({"major": "1", "minor": "35", "gitVersion": "v1.35.0"})
        elif path == "/api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            groups = [_group(version) for version in KINDS if "/" in version]
            self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif version in KINDS:
            known = {"singularName": "", "namespaced": True, "verbs": VERBS}
            kinds = KINDS[version].items()
            resources = [{"name": plural, "kind": kind} | known for kind, plural in kinds]
            head = {"kind": "APIResourceList", "groupVersion": version}
            self._answer(head | {"resources": resources})
        elif path.endswith("/secrets"):
            self._answer({"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []})
        else:
            status = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            self._answer(status, 404)

    def _echo(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        content_type = self.headers.get("content-type", "application/json")
        self._send(201 if self.command == "POST" else 200, body, content_type)

    do_POST = do_PUT = do_PATCH = _echo  # noqa: N815  (names of http.server)

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _group(version: str) -> dict[str, Any]:
    group, _, number = version.partition("/")
    shown = {"groupVersion": version, "version": number}
    return {"name": group, "versions": [shown], "preferredVersion": shown}
