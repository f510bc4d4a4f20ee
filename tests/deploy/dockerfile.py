"""The stages of the Dockerfile, and the files and environment that an image has."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from tests.deploy.shapes import SHAPES, misfits

KERNELS = "./kvasir/kernels/"
LIBRARY = "--from=library:/built/kvasir/kernels/libkvasir.so"
SERVES = ("kvasir.__main__", "kvasir.server.process.app", "kvasir.server.process.serve")


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
        for fault in import_faults(stage.copies, root):
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


def import_faults(copies: dict[str, str], root: Path) -> list[str]:
    """Follow imports at the top of modules from what serves; return those that nothing copies."""
    places = {
        PurePosixPath(target, path.name if target.endswith("/") else ""): path
        for source, target in copies.items()
        for path in root.glob(source)
        if target.startswith("./")
    }
    missing, seen, waiting = set[str](), set[str](), [*SERVES]
    while waiting:
        module = waiting.pop()
        path = file_of(module, {PurePosixPath("kvasir"): root / "kvasir"})
        if module in seen or path is None:  # a name in a module, or another package's
            continue
        seen.add(module)
        waiting += imports(path)
        if file_of(module, places) is None:
            missing.add(module)
    return [f"no COPY of {name}" for name in sorted(missing)]


def file_of(module: str, places: dict[PurePosixPath, Path]) -> Path | None:
    """Return the file of a module, by what is at each place of an image."""
    name = module.replace(".", "/")
    for path in (PurePosixPath(f"{name}.py"), PurePosixPath(name, "__init__.py")):
        for place, source in places.items():
            if path.is_relative_to(place) and (source / path.relative_to(place)).is_file():
                return source / path.relative_to(place)
    return None


@cache
def imports(path: Path) -> list[str]:
    """Return the modules that a file imports at its top, and names of theirs."""
    found: list[str] = []
    for one in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(one, ast.Import):
            found += [alias.name for alias in one.names]
        elif isinstance(one, ast.ImportFrom) and one.module:
            found += [one.module, *(f"{one.module}.{alias.name}" for alias in one.names)]
    return found
