"""`kvasir train` by two processes, of which the first waits for a line after each evaluation.

They are forked, as torchrun's would load PyTorch three times.
"""

from __future__ import annotations

import os
import socket
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in ("0", "1"):
        if not (child := os.fork()):
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            typer.run(train)
        started.append(child)
    for child in started:
        os.waitpid(child, 0)
