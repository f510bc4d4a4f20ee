"""Wheels for a machine without a network travel in pieces, which its README joins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvasir.loadtest.gpu.wheels import requirements, write_pieces

ROOT = Path(__file__).parents[2]


def test_wheels_travel_in_pieces(tmp_path: Path) -> None:
    wheel, out = tmp_path / "onnxruntime_gpu-1.0-py3-none-any.whl", tmp_path / "pieces"
    wheel.write_bytes(os.urandom(5000))
    pieces = write_pieces([wheel], out, "3.12", limit=3000)
    assert len(pieces) > 2
    assert all(piece.stat().st_size <= 3000 for piece in pieces)
    readme = (out / "README.md").read_text().splitlines()
    commands = [line.strip() for line in readme if line.startswith("    ")]
    subprocess.run(["/bin/sh", "-ec", "\n".join(commands)], cwd=out, check=True)
    assert (out / "wheels" / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_machines_pytorch_and_its_libraries_are_left_out() -> None:
    names = " ".join(requirements(ROOT / "pyproject.toml"))
    assert "onnxruntime-gpu" in names
    assert "onnxscript" in names
    assert "torch" not in names
    assert "nvidia" not in names
