"""Exports as a script runs them: lines for stages, and signals that leave nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.commands.console import progress
from kvasir.model.checkpoint import save_checkpoint
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.huggingface_checkpoints import make_model
from tests.kit.huggingface_checkpoints import save_checkpoint as save_folder
from tests.kit.random_models import make_config, make_decoder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = train_tokenizer(["a text of a few words"], 270)
    decoder = make_decoder(make_config(vocab_size=270, n_layer=1))
    save_checkpoint(folder / "run", 1, decoder, tokenizer, {}, {})
    save_folder(folder / "llama", make_model("llama"))
    return folder


@pytest.mark.parametrize(
    ("number", "exit_code", "source", "stage"),
    [
        (signal.SIGTERM, 143, "run", "tracing PyTorch"),
        (signal.SIGINT, 130, "llama", "tracing PyTorch"),
        (signal.SIGTERM, 143, "run", "computing in ONNX Runtime"),
    ],
)
def test_a_signal_leaves_nothing_behind(
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
    assert len(partial) == 1
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is before


def test_a_process_prints_its_stages_and_ends_by_sigterm(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvasir", "export", str(sources / "run")]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while "tracing" not in lines[-1]:
            assert lines[-1]
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        lines += process.stderr
    assert process.returncode == 143
    assert all(re.fullmatch(r" *\d+\.\d s  \w.*\n", line) for line in lines)
    assert len(lines) == len(set(lines)) > 1
    assert not list(tmp_path.iterdir())
