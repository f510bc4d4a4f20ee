"""Output of the commands: results on standard output, an error in one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from model.files import in_words

_OURS = frozenset({"commands", "export", "loadtest", "model", "server"})


def fail(error: object, *, exit_code: int = 1) -> NoReturn:
    """End the command with one line on standard error."""
    typer.echo(f"kvasir: {in_words(error)}", err=True)
    raise typer.Exit(exit_code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line for an error of ours, a ValueError or an OSError."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package in _OURS or isinstance(error, ValueError | OSError):
            fail(error)
        raise


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console without markup, and without colours where the environment says so."""
    make = partial(Console, stderr=stderr, quiet=quiet, markup=False, highlight=False)
    return make(color_system=None) if make().no_color else make()


def show(as_json: bool, values: Mapping[str, Any], *parts: RenderableType) -> None:
    """Print a result: `values` for a script, or `parts` for people."""
    if as_json:
        typer.echo(json.dumps(values))
    else:
        console().print(*parts, sep="\n")


def make_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with names on the left and figures on the right; an empty header is hidden."""
    table = Table(title=Text(title), show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def mebibytes(n_bytes: float) -> str:
    """Return a size in MiB, with its unit."""
    size = n_bytes / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB"


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
