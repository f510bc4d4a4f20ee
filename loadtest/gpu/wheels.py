"""Wheels for a machine with a card and no network, in pieces that travel.

python -m kvasir.loadtest.gpu.wheels FOLDER PYTHON_VERSION downloads what the extras cuda and train
need, without PyTorch and NVIDIA's libraries, which PyTorch brings.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

PIECE_BYTES = 64 * 2**20
_BROUGHT = re.compile(r"(torch|nvidia-)")  # with the machine's PyTorch
_NEWEST_GLIBC = 35  # 2.35; pip takes each version's wheels by name
_README = """# Wheels for make gpu-check

`SHA256SUMS` has the sums of the pieces and of the whole. On the machine with the card, in this
folder:

    cat {name}.part-* > {name}
    sha256sum --check SHA256SUMS
    mkdir wheels && tar -xf {name} -C wheels

Then, in Kvasir's source: `make gpu-check WHEELS=this-folder/wheels`, with `PYTHON=` a Python
{python} that has PyTorch built for CUDA 13.
"""


def requirements(pyproject: Path) -> list[str]:
    """Return the packages that the check needs beside PyTorch and what PyTorch brings."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["cuda"] + extras["train"]
    return [requirement for requirement in wanted if not _BROUGHT.match(requirement)]


def download(root: Path, folder: Path, python: str) -> None:
    """Download wheels for a Python of x86-64 Linux, and build that of this project."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, _NEWEST_GLIBC + 1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary=:all:", "--python-version", python, "--dest", str(folder)]
    options += ["--constraint", str(root / "constraints.txt")]
    options += [word for platform in platforms for word in ("--platform", platform)]
    _pip("download", *options, *requirements(root / "pyproject.toml"))
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(root))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    subprocess.run(command, check=True)  # noqa: S603  our own command


def write_pieces(
    wheels: list[Path], out: Path, python: str, limit: int = PIECE_BYTES
) -> list[Path]:
    """Write an archive of the wheels in pieces, their sums, and the way to join them."""
    out.mkdir(parents=True, exist_ok=True)
    name, whole = "gpu-wheels.tar", hashlib.sha256()
    for old in out.glob(f"{name}.part-*"):
        old.unlink()
    pieces, sums = list[Path](), list[str]()
    with TemporaryDirectory(dir=out) as folder:
        with tarfile.open(archive := Path(folder) / name, "w") as tar:
            for wheel in sorted(wheels):
                tar.add(wheel, wheel.name)
        with archive.open("rb") as stream:
            while content := stream.read(limit):
                pieces.append(out / f"{name}.part-{len(pieces):03}")
                pieces[-1].write_bytes(content)
                whole.update(content)
                sums.append(f"{hashlib.sha256(content).hexdigest()}  {pieces[-1].name}")
    lines = [*sums, f"{whole.hexdigest()}  {name}"]
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_README.format(name=name, python=python), encoding="utf-8")
    return pieces


def main(root: Path, out: Path, python: str) -> None:
    """Download and cut; say how much there is."""
    with TemporaryDirectory() as folder:
        download(root, Path(folder), python)
        wheels = list(Path(folder).glob("*.whl"))
        pieces = write_pieces(wheels, out, python)
    total = sum(piece.stat().st_size for piece in pieces) / 2**20
    print(f"{len(wheels)} wheels, {total:.0f} MiB, in {len(pieces)} pieces: {out}")  # noqa: T201


if __name__ == "__main__":
    main(Path(), Path(sys.argv[1]), sys.argv[2])
