"""Exports as a script runs them: lines for stages, and signals that leave nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.commands.console import progress
from tests.export.runs import save_run
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("sources")
    save_run(folder / "run")
    save_checkpoint(folder / "llama", make_model("llama"))
    return folder


@pytest.mark.parametrize(
    ("number", "exit_code", "source", "stage"),
    [
        (signal.SIGTERM, 143, "run", "tracing PyTorch"),
        (signal.SIGINT, 130, "llama", "tracing PyTorch"),
        (signal.SIGTERM, 143, "run", "computing in ONNX Runtime"),
    ],
)
def test_stages_are_lines_and_a_signal_leaves_nothing_behind(
    number: signal.Signals,
    exit_code: int,
    source: str,
    stage: str,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report, partial = progress.ProgressBar.__call__, list[Path]()

    def signalled(bar: progress.ProgressBar, what: str, *more: object) -> None:
        if what == stage and not partial:
            partial.extend(tmp_path.rglob("*.part-*"))
            signal.raise_signal(number)
        report(bar, what, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(progress.ProgressBar, "__call__", signalled)
    before = signal.getsignal(number)
    out = str(tmp_path / "new/out")
    result = CliRunner().invoke(app, ["export", str(sources / source), "--out", out])
    assert result.exit_code == exit_code
    lines = result.stderr.splitlines()
    assert all(re.fullmatch(r" *\d+\.\d s  \w.*", line) for line in lines)
    assert len(lines) == len(set(lines)) > 1
    assert len(partial) == 1
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is before
