"""Wheels for a machine that has PyTorch, but no network."""

from __future__ import annotations

from pathlib import Path

from kvasir.loadtest.gpu.wheels import requirements


def test_the_machines_pytorch_and_its_libraries_are_left_out() -> None:
    names = " ".join(requirements(Path(__file__).parents[2] / "pyproject.toml"))
    assert "onnxruntime-gpu" in names
    assert "onnxscript" in names
    assert "torch" not in names
    assert "nvidia" not in names
