"""Rules between rooms: the map in docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvasir import __main__ as command_line
from kvasir.commands.console import output
from tests.deploy.dockerfile import read_stages

ROOT = Path(__file__).parent.parent
ROOMS = ("model", "kernels", "export", "server", "integrations", "loadtest", "commands")
WITHOUT_TORCH = (
    "model.adapters",
    "model.directory",
    "model.config",
    "model.configuration",
    "model.download",
    "model.not_a_model",
    "model.onnx",
    "model.packing",
    "model.platform",
    "model.presets",
    "model.records",
    "model.template",
    "model.tokenizer",
    "model.tokenizer_limits",
)

# Each room may import itself and the rooms named here. The first rule that covers a file holds.
SHARED = (*WITHOUT_TORCH, "server.errors")
RULES = {
    "model.network": ("model.config", "model.configuration"),
    "model.training": ("model",),
    "model.importing": ("model.network", "model.tensor_files", *WITHOUT_TORCH),
    "model.download": (
        *("model.adapters", "model.directory", "model.not_a_model", "model.platform"),
    ),
    "model.adapters": ("model.platform", "model.records"),
    "model.platform": (),
    "model.template": ("model.directory", "model.platform"),
    "model": ("model.network",),
    "kernels": ("model.onnx",),
    # Verify a graph as it is served.
    "export.verification.own_operators": (
        *("export.verification", "kernels", "model", "server.engine"),
    ),
    "export.verification.paged_session": ("export.verification", "model", "server.engine"),
    "export.rewrite": ("model.platform",),
    "export.rounding": ("model", "export.rewrite"),
    "export.graphs": ("model", "export.rewrite", "export.rounding"),
    "export": ("model",),
    "server.errors": (),
    "server.settings": ("server.errors", "server.setting_values"),
    "server.setting_values": (),
    "server.engine.kv": (),
    "server.engine.adapters": ("model.adapters", "kernels"),
    "server.engine.grammar": ("model.platform",),
    "server.engine": (*WITHOUT_TORCH, "kernels"),
    "server.state": ("server.errors",),
    "server.telemetry": ("model.platform", "server.errors", "server.engine"),
    "server.text": (*WITHOUT_TORCH, "server.engine.grammar"),
    "server.batches": (*SHARED, "server.state"),
    "server.explain": (*SHARED, "server.engine", "server.text"),
    "server.requests": (
        *(*SHARED, "server.settings"),
        *("server.engine", "server.state", "server.telemetry", "server.text"),
    ),
    "server.api": (
        *(*SHARED, "server.settings", "server.setting_values", "server.explain"),
        *("server.engine", "server.state", "server.telemetry", "server.text"),
        *("server.requests", "server.batches"),
    ),
    "server.process": (*WITHOUT_TORCH, "kernels", "server"),
    "integrations": ("model.platform", "server"),
    "loadtest.locust": ("loadtest.client", "model.platform"),
    "loadtest": ("model", "kernels", "export", "server.engine", "server.process.local_server"),
    "commands": ROOMS,
    "kvasir": ("commands", "model.platform"),
}
ONLY_IMPORTERS = {
    "onnxruntime": ("model/onnx/runtime.py",),
    "redis": ("server/state/link.py",),
    "zmq": ("server/telemetry/kv_events.py",),
    "ray": ("integrations/node_share.py", "integrations/ray.py", "integrations/ray_batch.py"),
    "prometheus_client": ("server/telemetry/metrics.py", "server/telemetry/server_metrics.py"),
    "llguidance": ("server/engine/grammar/compiler.py", "server/engine/grammar/constraints.py"),
    "opentelemetry.sdk.trace.export": ("server/process/tracing.py",),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Names of the modules that a file imports, at any depth; ours are without `kvasir.`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(name.removeprefix("kvasir.") for name in found)


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


FILES = [ROOT / "kvasir/__main__.py"]
FILES += [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.name != "__init__.py"
]


def test_files_import_only_what_their_rooms_may() -> None:
    forbidden = dict[str, set[str]]()
    for path in FILES:
        name = module_name(path)
        room, allowed = next(rule for rule in RULES.items() if covers(rule[0], name))
        for one in imports(path):
            is_ours = any(covers(of_ours, one) for of_ours in (*ROOMS, "kvasir"))
            if is_ours and not any(covers(allowed_one, one) for allowed_one in (room, *allowed)):
                forbidden.setdefault(name, set()).add(one)
    assert not forbidden


def test_no_files_import_each_other_even_for_types() -> None:
    names = {module_name(path): imports(path) for path in FILES}
    graph = {
        name: {other for other in names for one in imported if covers(other, one)}
        for name, imported in names.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_some_packages_are_imported_in_one_place() -> None:
    importers = {
        package: tuple(
            path.relative_to(ROOT).as_posix()
            for path in FILES
            if any(covers(package, imported) for imported in imports(path))
        )
        for package in ONLY_IMPORTERS
    }
    assert importers == ONLY_IMPORTERS


def test_serving_needs_no_torch() -> None:
    """Nor do the files of `model` that it imports; each is imported in one process."""
    modules = ["server.process.serve", "server.engine.runner", "__main__", "loadtest.bench_serve"]
    modules += [
        name
        for name in map(module_name, FILES)
        if any(covers(room, name) for room in WITHOUT_TORCH)
    ]
    code = f"""import sys, importlib
for name in {modules}:
    importlib.import_module("kvasir." + name)
    assert not {{"torch", "onnx", "onnxscript", "gevent"}} & set(sys.modules), name"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_missing_package_is_named_with_its_extra() -> None:
    """As after installing only what serving needs."""
    code = """import sys
sys.modules["torch"] = None
from kvasir.__main__ import app
for arguments in (["train", "--out", "x"], ["bench", "engine"]):
    assert app(arguments, standalone_mode=False) == 1"""
    result = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("kvasir: this needs torch; install it with: pip install")


# Their help says so where they need a checkout; the others run in the server's image.
OF_A_CHECKOUT = {"export", "eval", "bench model", "bench engine", "bench serve"}
OF_A_CHECKOUT |= {"bench reproducibility", "bench steps"}
COMMANDS = {
    example.split(" ", 3)[1] if panel != "bench" else " ".join(example.split()[1:3]): function
    for panel, function, example in (
        *command_line._COMMANDS,
        *(("bench", function, example) for function, example in command_line._BENCHES),
    )
}


def in_the_image() -> set[str]:
    """Names that code may import in the server's image: standard, installed, or copied there."""
    names, wanted = set(sys.stdlib_module_names), ["kvasir-lm[cpu,otel,hub,oci,s3,redis,kv-events]"]
    installed: set[str] = set()
    while wanted:
        asked = Requirement(wanted.pop())
        installed.add(canonicalize_name(asked.name))
        for line in requires(asked.name) or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in asked.extras or {""}]
            is_new = canonicalize_name(needed.name) not in installed
            if is_new and any(not needed.marker or needed.marker.evaluate(e) for e in environments):
                wanted.append(str(needed).partition(";")[0])
    for module, packages in packages_distributions().items():
        if (installed - {"kvasir-lm"}) & {*map(canonicalize_name, packages)}:
            names.add(module)
    copies = read_stages(ROOT / "Dockerfile")["cpu"].copies
    return names | {Path(source).parts[0] for source in copies}


def test_commands_of_the_image_import_only_what_it_has() -> None:
    """Or what an error names with its extra, as that of `kvasir train` names torch."""
    of_file = {module_name(path): imports(path) for path in FILES}
    # A model for WebGPU and `kv_events` name their extras themselves.
    known = in_the_image() | set(output._EXTRAS) | {"onnxruntime_ep_webgpu", "zmq", "msgspec"}
    lacking = {}
    for command, function in COMMANDS.items():
        found, waiting = set[str](), [function.__module__.removeprefix("kvasir.")]
        while waiting:
            name = waiting.pop()
            for one in of_file.get(name, ()):
                ours = {one, one.rpartition(".")[0]} & of_file.keys()
                waiting += ours - found
                found |= ours or {one}
        if missing := {one for one in found if one.partition(".")[0] not in known}:
            lacking[command] = missing
    assert set(lacking) == OF_A_CHECKOUT, lacking


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert not [room for room in {path.parent.name for path in FILES} if f"{room}/" not in text]


def test_the_wall_clock_gives_dates_alone() -> None:
    """It may jump: durations and deadlines are of clocks that do not."""
    for path in (ROOT / "server").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<!int\()(?<![.\w])time\(\)|datetime\.now", text), path
        assert "time.time()" not in text or path.name == "start_clock.py", path
