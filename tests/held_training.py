"""commands.train, held by its first process at every evaluation until a line, or the end, comes on standard input."""

from __future__ import annotations

import os
import sys

import typer

from commands.train import train
from model.training import run


class HeldProgressBar(run.ProgressBar):
    def evaluated(self, step: int, held_out_loss: float, prompt: str, sample: str) -> None:
        super().evaluated(step, held_out_loss, prompt, sample)
        if os.environ["RANK"] == "0":  # the others wait for it
            sys.stdin.readline()


if __name__ == "__main__":
    run.ProgressBar = HeldProgressBar  # type: ignore[misc]
    typer.run(train)
