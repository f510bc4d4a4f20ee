"""`kvasir train` whose first process waits after each evaluation for a line on standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from kvasir.commands.train import train
from kvasir.model.training.metrics import StepMetrics
from kvasir.model.training.trainer import Report, Trainer

train_loop = Trainer.train


def held(
    trainer: Trainer, folder: Path, report: Report, forecast: Callable[[float], object]
) -> bool:
    def report_and_wait(metrics: StepMetrics, speed: float, sample: tuple[str, str]) -> None:
        report(metrics, speed, sample)
        if (
            metrics.held_out_loss is not None and os.environ["RANK"] == "0"
        ):  # the others wait for it
            sys.stdin.readline()

    return train_loop(trainer, folder, report_and_wait, forecast)


if __name__ == "__main__":
    Trainer.train = held  # type: ignore[assignment, method-assign]
    typer.run(train)
