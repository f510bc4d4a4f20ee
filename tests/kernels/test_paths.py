"""The paths of several CPUs, in emulation where this machine has another.

`check_paths.cc` compares them with the scalar one, and has forbidden pages around every buffer.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HASH = "81cfdac4fa17a778"  # of all results, on every CPU


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes the program for a compiler's machine, once."""
    folder = tmp_path_factory.mktemp("paths")

    def program(compiler: str) -> Path:
        found = shutil.which(compiler)
        if not found:
            pytest.skip(f"needs {compiler}")
        return made_by(Path(found).resolve())  # which may have several names

    @cache
    def made_by(compiler: Path) -> Path:
        flags = (ROOT / "kernels/compile_flags.txt").read_text().split()
        sources = [Path(__file__).with_name("check_paths.cc"), ROOT / "kernels/pack.cc"]
        sources += sorted((ROOT / "kernels").glob("path*.cc"))
        command = [str(compiler), *flags, f"-I{ROOT / 'kernels'}", "-static", *map(str, sources)]
        subprocess.run([*command, "-o", str(folder / compiler.name)], check=True)
        return folder / compiler.name

    return program


@pytest.mark.parametrize(
    ("compiler", "emulator", "paths"),
    [
        ("g++", (), None),
        ("x86_64-linux-gnu-g++", ("qemu-x86_64", "-cpu", "Haswell"), "avx2 scalar"),
        ("x86_64-linux-gnu-g++", ("qemu-x86_64", "-cpu", "Nehalem"), "scalar"),
        ("aarch64-linux-gnu-g++", ("qemu-aarch64",), "neon scalar"),
        ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "cortex-a53"), "scalar"),
    ],
)
def test_every_path_has_the_same_bits(
    build: Callable[[str], Path], compiler: str, emulator: tuple[str, ...], paths: str | None
) -> None:
    """As those of every other CPU; and none reads or writes beside a buffer."""
    for program in emulator[:1]:
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    command = [*emulator, str(build(compiler))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found, *names = result.stdout.split()
    assert found == HASH
    assert paths is None or names == paths.split()
