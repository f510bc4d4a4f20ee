"""Wheels for a machine with a card and no network: make gpu-wheels packs them in pieces.

python -m kvasir.loadtest.gpu.wheels FOLDER PYTHON_VERSION downloads what the extras cuda and train
need, without PyTorch and NVIDIA's libraries, which PyTorch brings.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

_BROUGHT = re.compile(r"(torch|nvidia-)")  # with the machine's PyTorch
_NEWEST_GLIBC = 35  # 2.35; pip takes each version's wheels by name


def requirements(pyproject: Path) -> list[str]:
    """Return the packages that the check needs beside PyTorch and what PyTorch brings."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["cuda"] + extras["train"]
    return [requirement for requirement in wanted if not _BROUGHT.match(requirement)]


def download(root: Path, folder: str, python: str) -> None:
    """Download wheels for a Python of x86-64 Linux, and build that of this project."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, _NEWEST_GLIBC + 1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary=:all:", "--python-version", python, "--dest", folder]
    options += ["--constraint", str(root / "constraints.txt")]
    options += [word for platform in platforms for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wanted = requirements(root / "pyproject.toml")
    subprocess.run([*pip, "download", *options, *wanted], check=True)  # noqa: S603
    build = ["wheel", "--no-deps", "--wheel-dir", folder, str(root)]
    subprocess.run([*pip, *build], check=True)  # noqa: S603


if __name__ == "__main__":
    download(Path(), sys.argv[1], sys.argv[2])
