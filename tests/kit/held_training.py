"""Pairs of processes that run `kvasir train` together, as torchrun starts them.

Each line of input is the arguments of a pair. Pairs are forked from here, since loading PyTorch
takes as long as their training. The first process of a pair waits for a line after each evaluation;
the pair's exit codes are told when both have ended.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo

from kvasir.model.training import preparation, run, trainer
from kvasir.model.training.flops import peak_flops
from kvasir.model.training.metrics import StepMetrics
from kvasir.model.training.trainer import Report, Trainer

LOADED = (preparation, run, torch._dynamo)  # late otherwise, by each process
train_loop = Trainer.train


def held(
    trained: Trainer, folder: Path, report: Report, forecast: Callable[[float], object]
) -> bool:
    def report_and_wait(metrics: StepMetrics, speed: float, sample: tuple[str, str]) -> None:
        report(metrics, speed, sample)
        is_first = os.environ["RANK"] == "0"  # the other waits for it
        if metrics.held_out_loss is not None and is_first:
            sys.stdin.readline()

    return train_loop(trained, folder, report_and_wait, forecast)


def run_pair(arguments: list[str]) -> list[int]:
    """Return the exit codes of both processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in ("0", "1"):
        if not (child := os.fork()):
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            sys.argv = ["train", *arguments]
            runpy.run_module("kvasir.commands.train", run_name="__main__")
        started.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


if __name__ == "__main__":
    Trainer.train = held  # type: ignore[assignment, method-assign]
    trainer._REHEARSALS = 2  # instead of more than a run has steps
    peak_flops(torch.device("cpu"), torch.float32)  # which is measured once
    while line := sys.stdin.readline():
        print("ended", *run_pair(json.loads(line)), flush=True)  # noqa: T201
