"""How long a server takes until it is ready, step by step, as its own log says: make cold-start

Medians of several starts, in seconds. With --cold the page cache is dropped before each of them, so that files come
from the disk; that takes root on Linux.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.local_server import run_server, serve_command

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def start(directory: Path) -> dict[str, float]:
    """Seconds by step, of one start."""
    with run_server(serve_command(directory)) as ready:
        seconds: dict[str, float] = ready["start_seconds"]
    return seconds


def drop_page_cache() -> None:
    """Raises OSError where that is not allowed."""
    os.sync()  # only what is written is dropped
    _DROP_CACHES.write_text("3", encoding="ascii")


def table(title: str, starts: list[dict[str, float]]) -> Table:
    drawn = Table("step", "seconds", title=title)
    for step in starts[0]:
        drawn.add_row(step.replace("_", " "), f"{median(one[step] for one in starts):.3f}")
    return drawn


def main(
    model: Annotated[Path, typer.Argument(help="Model directory.")] = Path("examples/stdlib"),
    runs: Annotated[int, typer.Option(min=1, help="Starts.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the page cache before each.")] = False,
) -> None:
    """Start a server several times and say where the time went."""
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
