"""The stages of the Dockerfile, and the files and environment that an image has."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.deploy.shapes import SHAPES, misfits

KERNELS = "./kvasir/kernels/"
LIBRARY = "--from=library:/built/kvasir/kernels/libkvasir.so"
SERVE = """import kvasir.__main__, kvasir.server.process.app, kvasir.server.process.serve, sys
print(*[name for name, module in sys.modules.items() if name.partition(".")[0] == "kvasir"
        and not module.__file__.startswith(sys.argv[1])])
"""


@dataclass
class Stage:
    """A stage with what it inherits from the stages that it is made from."""

    copies: dict[str, str] = field(default_factory=dict)  # source to destination
    environment: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)  # USER, ENTRYPOINT and others that replace


def read_stages(dockerfile: Path) -> dict[str, Stage]:
    """Return the stages by name."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text(encoding="utf-8"))
    stages: dict[str, Stage] = {}
    stage = Stage()
    for word, rest in re.findall(r"^([A-Z]+) +(.+)$", text, re.MULTILINE):
        if word == "FROM":
            base, _, name = rest.split()
            stage = deepcopy(stages.get(base, Stage()))
            stages[name] = stage
            if base not in stages and base != "${BASE}":
                stage.words["FROM"] = base
        elif word == "COPY":
            *sources, target = rest.split()
            origin = sources.pop(0) + ":" if sources[0].startswith("--from=") else ""
            for source in sources:
                stage.copies[origin + source] = target
        elif word == "ENV":
            stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        else:
            stage.words[word] = rest
    return stages


def image_faults(root: Path) -> Iterator[str]:
    """Yield what the images lack."""
    stages = read_stages(root / "Dockerfile")
    text = re.sub("^#.*", "", (root / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found := re.findall(r"--ch\w+|\b(?:ADD|chmod|chown|setcap|sudo|curl|wget)\b", text):
        yield f"files that another may change, or that nobody verifies: {found}"
    seen = re.findall("^!(.+)", (root / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source for stage in stages.values() for source in stage.copies if ":" not in source}
    yield from (
        f".dockerignore hides {one}" for one in sources if not re.match("|".join(seen), one)
    )
    for name, stage in stages.items():
        yield from misfits(stage.words, SHAPES["image"].get(name, {"*": "any"}), name)
        base = stage.words.get("FROM", "python:3.11")
        if not re.fullmatch(r"[a-z/]+:\d+\.\d+[\w.-]*(@sha256:\w+)?", base):
            yield f"{name}: {base} names no version"
    for name in ("cpu", "cuda"):
        stage = stages[name]
        model = stage.environment["KVASIR_MODEL"]
        if model not in stage.copies.values():
            yield f"{name}: KVASIR_MODEL is {model}, which no COPY makes"
        if stage.environment["PYTHONPATH"] != stage.words["WORKDIR"]:
            yield f"{name}: the source is in {stage.words['WORKDIR']}, not in PYTHONPATH"
        copies = [(source, at) for source, at in stage.copies.items() if at.startswith("./")]
        files = [(path.resolve(), at) for one, at in copies for path in sorted(root.glob(one))]
        for fault in import_faults(tuple(files)):
            yield f"{name}: {fault}"
    if "loadtest" not in stages["load"].copies:
        yield "load: no COPY of loadtest"
    for name in ("cpu", "cuda", "load"):
        if f"--from=packages-{name}:/opt/kvasir" not in stages[name].copies:
            yield f"{name}: no COPY of its packages"
    yield from kernels_faults(root, stages)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {
        "pyproject.toml",
        "constraints.txt",
        "kvasir/__init__.py",
        project["project"]["readme"],
    }
    needed |= set(project["project"]["license-files"])
    if missing := needed - stages["packages"].copies.keys():
        yield f"packages: no COPY of {sorted(missing)}"


def kernels_faults(root: Path, stages: dict[str, Stage]) -> Iterator[str]:
    """Yield what the images lack of kernels/, most of which is imported only once it is used."""
    for name in ("cpu", "cuda"):
        wanted = {*root.glob("kernels/*.py"), root / "kernels/self_test.onnx"}
        for source, target in stages[name].copies.items():
            if target == KERNELS and ":" not in source:
                wanted -= {*root.glob(source)}
        if wanted:
            yield f"{name}: no COPY of {sorted(path.name for path in wanted)} of kernels"
    if stages["cpu"].copies.get(LIBRARY) != KERNELS:
        yield "cpu: no COPY of the library of operators"
    if missing := {"setup.py", "kernels"} - stages["library"].copies.keys():
        yield f"library: no COPY of {sorted(missing)}"


@cache
def import_faults(copies: tuple[tuple[Path, str], ...]) -> list[str]:
    """Import the server in a folder that has only what the image copies; return what it lacks."""
    with tempfile.TemporaryDirectory() as folder:
        for source, target in copies:
            place = Path(folder, target, source.name if target.endswith("/") else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(source)
        command = [sys.executable, "-B", "-c", SERVE, folder]
        done = subprocess.run(
            command, cwd=folder, env={"PYTHONPATH": folder}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    if done.returncode:
        return [done.stderr.strip().splitlines()[-1]]
    return [f"no COPY of {name}" for name in done.stdout.split()]
