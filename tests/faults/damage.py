"""Damaged model directories: one line on standard error, exit code 1, nothing is served."""

from __future__ import annotations

import random
import shutil
import subprocess
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest.local_server import serve_command
from model.bundle import MANIFEST_FILE
from tests.fake_runner import TIMEOUT
from tests.faults.probe import EXAMPLE
from tests.faults.report import Report


def damaged_models(n: int, seed: int = 0) -> Report:
    """Flip a bit of a file, cut off its end, or remove it, n times."""
    report = Report("damaged model files")
    chance = random.Random(seed)
    names = sorted(path.name for path in EXAMPLE.iterdir())
    cases = list(product(names, (_flip, _truncate, _remove)))
    for name, change in chance.sample(cases, min(n, len(cases))):
        report.tried += 1
        with TemporaryDirectory() as folder:
            directory = shutil.copytree(EXAMPLE, Path(folder) / "model")
            what = f"{name}: {change(chance, directory / name)}"
            wrong = _refusal(directory)
        report.check(wrong == "", f"{what}: {wrong}")
    return report


def _refusal(directory: Path) -> str:
    """Return what is wrong with the server's refusal of the directory."""
    command = serve_command(directory)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "it is served"
    lines = run.stderr.splitlines()
    if run.returncode == 1 and len(lines) == 1 and lines[0].startswith("kvasir: "):
        return ""
    return f"exit code {run.returncode}, {run.stderr[-300:]!r}"


def _flip(chance: random.Random, path: Path) -> str:
    """Flip a bit; in the manifest only among names and hashes, because the rest is not checked."""
    content = bytearray(path.read_bytes())
    first, last = 0, len(content)
    if path.name == MANIFEST_FILE:
        first = content.index(b'"files"')
        last = content.index(b"}", first)
    at = chance.randrange(first, last)
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"bit flipped in byte {at}"


def _truncate(chance: random.Random, path: Path) -> str:
    content = path.read_bytes()
    n_left = chance.randrange(len(content))
    path.write_bytes(content[:n_left])
    return f"cut after {n_left} bytes"


def _remove(_chance: random.Random, path: Path) -> str:
    path.unlink()
    return "missing"
