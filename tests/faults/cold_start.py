"""Measure the time until a server is ready, step by step, as its log reports it: make cold-start

Medians of several starts, in seconds. --cold drops the page cache before each start, so that files
come from the disk; this takes root on Linux.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvasir.server.process.local_server import run_server, serve_command
from tests.faults.server_process import EXAMPLE, Model


def start(directory: Path) -> dict[str, float]:
    """Return the seconds of one start by step."""
    with run_server(serve_command(directory)) as ready:
        seconds: dict[str, float] = ready["start_seconds"]
    return seconds


def drop_page_cache() -> None:
    """Drop clean pages, after writing the others. Raises OSError without root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def table(title: str, starts: list[dict[str, float]]) -> Table:
    """Return the median of each step."""
    drawn = Table("step", "seconds", title=title)
    for step in starts[0]:
        drawn.add_row(step.replace("_", " "), f"{median(one[step] for one in starts):.3f}")
    return drawn


def main(
    model: Model = EXAMPLE,
    runs: Annotated[int, typer.Option(min=1, help="Starts.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the page cache before each.")] = False,
) -> None:
    """Start a server several times and show the time of each step."""
    starts = []
    try:
        for _ in range(runs):
            if cold:
                drop_page_cache()
            starts.append(start(model))
    except (ChildProcessError, OSError) as error:
        typer.echo(f"no figures: {error}", err=True)
        raise typer.Exit(1) from None
    state = "cold" if cold else "warm"
    Console().print(table(f"{model.name}, {runs} {state} starts, medians", starts))


if __name__ == "__main__":
    typer.run(main)
