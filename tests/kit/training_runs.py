"""Runs of `kvasir train`, and settings for few steps."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer import testing
from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.model.training import trainer
from kvasir.model.training.settings import TrainSettings

SETTINGS = TrainSettings(steps=4, context=16, batch_size=4, warmup=2, mixed_precision=False)

# A run first takes the time of some steps: of more than tests train.
trainer._REHEARSALS = 2
# Else each run builds every command's options again.
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]


def leave_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty pictures of runs: to draw one takes as long as a short run."""
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: Path(path).touch())


def undrawn() -> Iterator[None]:
    """The same of all tests of a module, which makes a fixture of this."""
    with pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        yield


def kvasir_train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)


def trained(*arguments: str) -> str:
    """Run a command that must succeed, and return its output."""
    result = kvasir_train(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def metrics(folder: str | Path) -> list[dict[str, str]]:
    """metrics.csv as written, apart from the columns that cannot repeat."""
    with Path(folder, "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"], row["mfu"]
    return rows
