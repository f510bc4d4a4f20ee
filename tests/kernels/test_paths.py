"""The paths of several CPUs, in emulation where this machine has another.

`check_paths.cc` compares them with the scalar one, and has forbidden pages around every buffer.
No emulator has the tiles of AMX, so its product is tried with tiles in plain C++.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of all results, and of every seventh trial's, on every CPU.
HASHES = {1: "a97e2769187e7931", 7: "85a9b0e48149ff9b"}

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Slow to compile with them, and few machines run it.
NOT_SANITIZED = "path_avx512"
# Compiled as it is shipped, which nothing else tries. What is shipped for x86-64 is compared with
# NumPy by the tests beside this one; optimizing it takes most of a compiler's time.
SHIPPED = "path_neon"


def find(program: str) -> Path:
    """Return where a program is, which may have several names, or skip the test."""
    found = shutil.which(program)
    if not found:
        pytest.skip(f"needs {program}")
    return Path(found).resolve()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return what makes the program for a compiler's machine, once."""
    folder = tmp_path_factory.mktemp("paths")

    def run(*command: str | Path) -> None:
        subprocess.run(command, check=True)

    @cache
    def program(compiler: Path, link: str, *sanitizers: str) -> Path:
        objects = folder / f"{compiler.name}{len(sanitizers)}"
        objects.mkdir()
        sources = [*Path(__file__).parent.glob("*.cc"), ROOT / "kernels/pack.cc"]
        for source in (*sources, *sorted((ROOT / "kernels").glob("path*.cc"))):
            made = objects / f"{source.stem}.o"
            if sanitizers and source.stem == NOT_SANITIZED:
                made.symlink_to(program(compiler, "-static").with_name(made.name))
                continue
            flags = [*(ROOT / "kernels/compile_flags.txt").read_text().split(), *sanitizers]
            if source.stem != SHIPPED:
                flags += ["-O0" if sanitizers else "-O1"]
            run(compiler, *flags, f"-I{ROOT / 'kernels'}", "-c", source, "-o", made)
        run(compiler, link, *sanitizers, *objects.iterdir(), "-o", objects / "check")
        return objects / "check"

    return program


@pytest.mark.parametrize(
    ("compiler", "emulator", "paths", "step"),
    [
        ("g++", (), None, 1),
        ("aarch64-linux-gnu-g++", ("qemu-aarch64",), "neon scalar", 1),
        # The same code as above: these show which path a CPU takes, and that it has what it takes.
        ("x86_64-linux-gnu-g++", ("qemu-x86_64", "-cpu", "Haswell"), "avx2 scalar", 7),
        ("x86_64-linux-gnu-g++", ("qemu-x86_64", "-cpu", "Nehalem"), "scalar", 7),
        ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "cortex-a53"), "scalar", 7),
    ],
)
def test_every_path_has_the_same_bits(
    build: Callable[..., Path],
    compiler: str,
    emulator: tuple[str, ...],
    paths: str | None,
    step: int,
) -> None:
    """As those of every other CPU; and none reads or writes beside a buffer."""
    for program in emulator[:1]:
        find(program)
    command = [*emulator, str(build(find(compiler), "-static")), str(step)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found, *names = result.stdout.split()
    assert found == HASHES[step]
    assert paths is None or names == paths.split()


def test_no_path_does_what_sanitizers_find(build: Callable[..., Path]) -> None:
    """Nor packing: no memory beside its own, no undefined behaviour."""
    program = build(find("g++"), "-pie", *SANITIZERS)
    result = subprocess.run([program, "7"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
