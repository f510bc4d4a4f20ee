"""Runs of `kvasir train`, and settings for few steps."""

from __future__ import annotations

import csv
from pathlib import Path

from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.model.training.settings import TrainSettings

SETTINGS = TrainSettings(steps=4, context=16, batch_size=4, warmup=2, mixed_precision=False)


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
