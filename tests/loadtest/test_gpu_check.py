"""The parts of the GPU check that need no GPU: its report, and its peer on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import gpu_check
from loadtest.gpu_check import FigureLog, Peer, check_parity
from model.config import preset
from tests.engine.test_session import NO_GPU


def test_a_failure_costs_only_its_own_figure(tmp_path: Path) -> None:
    def fail() -> float:
        raise RuntimeError("out of memory")

    report = FigureLog(tmp_path / "figures.json")
    report.note("one", lambda: 1.5)
    report.note("two", fail)
    assert json.loads((tmp_path / "figures.json").read_text())["two"] == {
        "failed": "RuntimeError: out of memory"
    }
    report.note("three", lambda: {"a": 3})
    written = json.loads((tmp_path / "figures.json").read_text())
    assert (written["one"], written["three"], report.failures) == (1.5, {"a": 3}, ["two"])


def test_the_peer_generates_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_NEW", 3), ("_PROMPT", 8), ("_ROUNDS", 1)):
        monkeypatch.setattr(gpu_check, name, value)
    assert Peer(preset("tiny", n_layer=1), "cpu").static(2) > 0


@NO_GPU
def test_parity_fails_without_a_gpu(tmp_path: Path) -> None:
    report = FigureLog(tmp_path / "figures.json")
    report.note("parity", lambda: check_parity(tmp_path / "tiny", "tiny", "bf16"))
    assert report.failures == ["parity"]
    assert "NoDeviceError" in report.figures["parity"]["failed"]
