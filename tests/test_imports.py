"""Who may import whom: the map in docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("model", "export", "server", "loadtest", "commands")
NO_TORCH = ("model.config", "model.tokenizer", "model.bundle", "model.chat")
LEAVES = ("server.errors", "server.settings")

# What each room may import of ours, most special first; a name covers what is below it.
ALLOWED = {
    "model.config": (),
    "model.tokenizer": (),
    "model.progress": (),
    "model.file_errors": (),
    "model.bundle": ("model.config", "model.tokenizer"),
    "model.chat": ("model.bundle",),
    "model": ("model",),
    "export.paged_session": ("model", "export", "server.engine"),  # verified as it is served
    "export": ("model", "export"),
    "server.errors": (),
    "server.settings": ("server.errors", "server.engine.machine"),
    "server.start_clock": (),
    "server.engine.speculation": ("server.engine.sampling", "server.engine.sequence"),
    "server.engine": (*NO_TORCH, "server.engine"),
    "server.api_keys": LEAVES,
    "server.metrics": (*LEAVES, "server.engine"),
    "server.detokenizer": NO_TORCH,
    "server.tool_calls": (),
    "server.tool_grammar": ("server.tool_calls", "server.engine.constraints", "server.engine.json_schemas"),
    "server.chat_format": ("model.chat", "server.tool_calls"),
    "server.forecast": ("server.engine",),
    "server.admission": (*LEAVES, *NO_TORCH, "server.engine", "server.forecast"),
    "server.async_engine": (*LEAVES, *NO_TORCH, "server.engine", "server.forecast", "server.metrics"),
    "server.completion": (
        *LEAVES,
        *NO_TORCH,
        "server.engine",
        "server.forecast",
        "server.admission",
        "server.async_engine",
        "server.detokenizer",
    ),
    "server.service": (
        "server.completion",
        "server.chat_format",
        "server.grammars",
        "server.start_clock",
        *LEAVES,
        *NO_TORCH,
        "server.engine",
        "server.admission",
        "server.async_engine",
        "server.metrics",
    ),
    "server.api": (*LEAVES, *NO_TORCH, "server"),
    "server": (*NO_TORCH, "server"),
    "loadtest.bench_engine": (*NO_TORCH, "model.decoder", "model.progress", "server.engine", "loadtest.random_model"),
    "loadtest.random_model": ("model", "export"),
    "loadtest.gpu_check": ("model", "export", "server.engine", "loadtest"),
    **dict.fromkeys(("loadtest.sse_client", "loadtest.slo", "loadtest.traffic", "loadtest.request_log"), ()),
    "loadtest.served": ("loadtest.sse_client",),
    "loadtest.report": ("loadtest.request_log", "loadtest.slo"),
    "loadtest.locustfile": ("loadtest.served", "loadtest.sse_client", "loadtest.slo", "loadtest.traffic"),
    "loadtest.run_locust": ("loadtest.local_server", "loadtest.slo"),
    "loadtest.bench_serve": ("loadtest", "model.progress"),
    "loadtest": ("loadtest.sse_client", "loadtest.load", "loadtest.local_server", "loadtest.serve_figures"),
    "commands.output": ("model.config", "model.file_errors"),
    "commands.progress": ("commands.output",),
    "commands.group": ("model.file_errors", "server.settings"),
    "commands": ROOMS,
    "kvasir": ("commands",),
}
# Left to right: nothing in a file of the server may import what stands to its right.
SERVER_ORDER = (
    "server.engine",
    "server.forecast",
    "server.admission",
    "server.async_engine",
    "server.service",
    "server.api",
    "server.app",
    "server.connection",
    "server.serve",
)
ONLY_IMPORTER = {
    "onnxruntime": "server/engine/session.py",
    "prometheus_client": "server/metrics.py",
    "llguidance": "server/engine/constraints.py",
    "opentelemetry.sdk.trace.export": "server/tracing.py",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


FILES = [ROOT / "kvasir.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    name = module_name(path)
    allowed = next(rooms for prefix, rooms in ALLOWED.items() if covers(prefix, name))
    ours = {imported for imported in imports(path) if any(covers(room, imported) for room in (*ROOMS, "kvasir"))}
    forbidden = {imported for imported in ours if not any(covers(room, imported) for room in allowed)}
    assert not forbidden, f"{name} may not import {sorted(forbidden)}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_server_imports_only_to_the_left(path: Path) -> None:
    places = [i for i, room in enumerate(SERVER_ORDER) if covers(room, module_name(path))]
    for right in SERVER_ORDER[places[0] + 1 :] if places else ():
        assert not any(covers(right, imported) for imported in imports(path)), f"{path} imports {right}"


@pytest.mark.parametrize(("package", "owner"), ONLY_IMPORTER.items())
def test_one_file_of_the_server_imports(package: str, owner: str) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if path.is_relative_to(ROOT / "server") and any(covers(package, imported) for imported in imports(path))
    }
    assert importers == {owner}


@pytest.mark.parametrize(
    "module", ["server.app", "server.serve", "server.engine.runner", "kvasir", "loadtest.bench_serve", "model.chat"]
)
def test_serving_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'onnx', 'onnxscript', 'gevent') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("package", "arguments"), [("torch", ["train", "--out", "x"]), ("torch", ["bench", "engine"])])
def test_a_missing_package_is_named_with_its_extra(package: str, arguments: list[str]) -> None:
    """As after installing only what serving needs."""
    code = f"import sys; sys.modules[{package!r}] = None; import kvasir; sys.argv[1:] = {arguments!r}; kvasir.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"kvasir: this needs {package}; install it with: pip install")
    assert result.stderr.count("\n") == 1


def test_every_product_file_is_on_the_map() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    missing = [path.name for path in FILES if path.name != "__init__.py" and path.name not in text]
    assert not missing
