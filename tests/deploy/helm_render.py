"""The chart as the cluster would get it, without a cluster: python helm_render.py CHART [VALUES.yaml …] > objects.yaml

A `helm` on the PATH renders it; otherwise Helm's own engine does, as PyPI's helm-sdkpy (Python 3.12 or newer) has it:
that one only installs, so it installs into an API server of a few lines, which knows the kinds and keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

# Kinds that the chart may emit, with the name of their collection; also what .Capabilities.APIVersions says.
KINDS = {
    "v1": {
        "Secret": "secrets",
        "Service": "services",
        "ConfigMap": "configmaps",
        "ServiceAccount": "serviceaccounts",
    }
    | {"Pod": "pods"},
    "apps/v1": {"Deployment": "deployments"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
}
DEBUG_HINT = (
    "Use --debug flag to render out invalid YAML"  # what the command adds to some of its errors
)
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class RenderError(Exception):
    """What Helm says of values or templates that are wrong."""


def render(chart: Path, values: dict[str, Any], release: str = "release") -> list[dict[str, Any]]:
    """Every object of the chart, test hooks included. Raises RenderError."""
    text = (
        _by_command(chart, values, release)
        if shutil.which("helm")
        else _by_package(chart, values, release)
    )
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
            done = await helm_sdkpy.Install(configuration).run(
                release, str(chart), values=values, wait=False
            )
            return str(done["manifest"]) + "".join(
                "---\n" + hook["manifest"] for hook in done.get("hooks", ())
            )

        try:
            return asyncio.run(install())
        except helm_sdkpy.HelmError as error:
            raise RenderError(str(error)) from None


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "c", "user": {}}],
    }


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
    """Discovery, empty lists, and whatever is created comes back as it was."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].rstrip("/")
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/version":
            self._answer({"major": "1", "minor": "35", "gitVersion": "v1.35.0"})
        elif path == "/api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self._answer(
                {
                    "kind": "APIGroupList",
                    "apiVersion": "v1",
                    "groups": [_group(v) for v in KINDS if "/" in v],
                }
            )
        elif version in KINDS:
            self._answer(
                {
                    "kind": "APIResourceList",
                    "groupVersion": version,
                    "resources": _resources(version),
                }
            )
        elif path.endswith("/secrets"):
            self._answer({"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []})
        else:
            self._answer(
                {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404
            )

    def _echo(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._send(
            201 if self.command == "POST" else 200,
            body,
            self.headers.get("content-type", "application/json"),
        )

    do_POST = do_PUT = do_PATCH = _echo  # noqa: N815  (as http.server has it)

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


def _group(version: str) -> dict[str, Any]:
    shown = {"groupVersion": version, "version": version.split("/")[1]}
    return {
        "name": version.split("/", maxsplit=1)[0],
        "versions": [shown],
        "preferredVersion": shown,
    }


def _resources(version: str) -> list[dict[str, Any]]:
    return [
        {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
        for kind, plural in KINDS[version].items()
    ]


def merge(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm does with values files: maps key by key, everything else is replaced."""
    both = {
        key: merge(values[key], over[key])
        for key in values.keys() & over.keys()
        if _are_maps(values[key], over[key])
    }
    return values | over | both


def _are_maps(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


if __name__ == "__main__":
    merged: dict[str, Any] = {}
    for name in sys.argv[2:]:
        merged = merge(merged, yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {})
    yaml.safe_dump_all(render(Path(sys.argv[1]), merged), sys.stdout)
