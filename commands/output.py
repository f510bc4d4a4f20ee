"""What the commands say and where: results on standard output, an error in one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from model.config import PRESETS
from model.files import in_words

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


def check_text(text: str) -> str:
    """For an argument that is read, rather than a path: the shell passes any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{text!r} is not UTF-8 text") from None
    return text


def fail(error: object, *, exit_code: int = 1) -> NoReturn:
    """End with one line on standard error."""
    typer.echo(f"kvasir: {in_words(error)}", err=True)
    raise typer.Exit(exit_code)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where tables and lines go: brackets are no markup, and numbers have no colours of their own. Without any escape
    code where colours are not wanted.
    """
    make = partial(Console, stderr=stderr, quiet=quiet, markup=False, highlight=False)
    made = make()
    return make(color_system=None) if made.no_color else made


def complete_preset(incomplete: str) -> list[str]:
    """The names that the shell offers."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def show(as_json: bool, values: Mapping[str, Any], *parts: RenderableType) -> None:
    """The same result for a script or for people."""
    if as_json:
        typer.echo(json.dumps(values))
    else:
        console().print(*parts, sep="\n")


def figures(title: str, rows: Mapping[str, str]) -> Table:
    """One figure or word a row, with its unit, aligned right."""
    table = Table(title=Text(title), show_header=False)
    table.add_column("")
    table.add_column(justify="right", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def mebibytes(n_bytes: float) -> str:
    size = n_bytes / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB"


def peak_memory() -> int:
    """Bytes that this process has had in memory at most."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
