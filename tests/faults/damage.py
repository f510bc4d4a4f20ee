"""Model directories with something wrong in one file: one line on standard error, exit code 1, nothing is served."""

from __future__ import annotations

import random
import shutil
import subprocess
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from model.bundle import MANIFEST_FILE
from tests.fake_runner import TIMEOUT
from tests.faults.report import Report
from tests.faults.server_process import EXAMPLE, command


def damaged_models(n: int, seed: int = 0) -> Report:
    """n of: a byte changed, the end cut off, or all of it missing, in each file of a model directory."""
    report = Report("damaged model files")
    chance = random.Random(seed)
    cases = list(
        product(sorted(path.name for path in EXAMPLE.iterdir()), (_flip, _truncate, _remove))
    )
    for name, change in chance.sample(cases, min(n, len(cases))):
        report.tried += 1
        with TemporaryDirectory() as folder:
            directory = shutil.copytree(EXAMPLE, Path(folder) / "model")
            what = f"{name}: {change(chance, directory / name)}"
            said = _refusal(directory)
        report.check(said == "", f"{what}: {said}")
    return report


def _refusal(directory: Path) -> str:
    """What is wrong with how the server refuses the directory."""
    try:
        run = subprocess.run(
            command(directory, 0), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "it is served"
    lines = run.stderr.splitlines()
    if run.returncode == 1 and len(lines) == 1 and lines[0].startswith("kvasir: "):
        return ""
    return f"exit code {run.returncode}, {run.stderr[-300:]!r}"


def _flip(chance: random.Random, path: Path) -> str:
    """In the manifest among its names and hashes: what else it says is for people, and guards nothing."""
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
