"""The end of a command: its result, or a mistake in one line, and the exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NoReturn

import typer
from pydantic import ByteSize, ValidationError
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from kvasir.model.platform.files import in_words
from kvasir.model.platform.suggestions import install_command
from kvasir.server.setting_values import describe_fault

_NOT_IN_IMAGES = frozenset({"export", "loadtest"})  # the server's images leave them out
_LONGEST_LINE = 1000
_BOX_WIDTH = 120  # columns: those of names, types and descriptions side by side
# The extra that brings a package which partial installations lack; "" is the package alone.
_EXTRAS = {"onnxruntime": "cpu", "tensorboard": "tensorboard", "matplotlib": ""}
_EXTRAS |= dict.fromkeys(("torch", "gguf", "onnx", "onnx_ir", "safetensors"), "train")
_EXTRAS |= {"huggingface_hub": "hub", "oras": "oci", "boto3": "s3", "ray": "ray", "pyarrow": "ray"}


class CommandGroup(TyperGroup):
    """Typer's group with errors in one line instead of a box, and no escape codes under NO_COLOR.

    Exit codes: 0; 1 for a failure; 2 for a command line or setting that cannot be read; 130 for
    Ctrl-C and 143 for SIGTERM, except in `serve`, which drains and exits with 0.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run the command, and exit unless `standalone_mode` is false."""
        if Console().no_color:
            from typer import rich_utils

            rich_utils.COLOR_SYSTEM = None
        message, code = "", 1
        try:
            code = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
        except typer.TyperException as error:
            message, code = _one_line(error), error.exit_code
        except ModuleNotFoundError as error:
            message = _missing(error)
        except OSError as error:
            message = ("" if error.filename else "standard output: ") + in_words(error)
            # What is still buffered goes nowhere.
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if message:
            typer.echo(f"kvasir: {message}", err=True)
        if standalone_mode:
            sys.exit(code)
        return code


class Command(TyperCommand):
    """Typer's command, whose help cuts no name: in narrow terminals its boxes would."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, in boxes where these have room."""
        if Console().width < _BOX_WIDTH:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options without boxes, in the same panels."""
        panels = defaultdict(list)
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = f"{parameter.param_type_name}s".capitalize()
                panels[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _one_line(error: typer.TyperException) -> str:
    """Return Typer's message in one line: lower case, no full stop, a pointer to the help."""
    if isinstance(error.__cause__, ValidationError):
        error.message = describe_fault(error.__cause__)
    line = " ".join(error.format_message().split()).replace(". Did you", "; did you").rstrip(".?")
    line = re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1", line)
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if line and context is not None else ""
    return line[:1].lower() + line[1:] + hint


def _missing(error: ModuleNotFoundError) -> str:
    """Return how to get the package. Raises the error again for an unknown one."""
    name = error.name or ""
    package = name.partition(".")[0]
    if package in _EXTRAS:
        extra = _EXTRAS[package]
        command = install_command(extra) if extra else f"pip install {package}"
        return f"this needs {name}; install it with: {command}"
    room = name.removeprefix("kvasir.").partition(".")[0]
    if room in _NOT_IN_IMAGES:
        return f"this needs {room}/, which is not installed here; run it in a checkout of Kvasir"
    raise error


def fail(error: object, *, exit_code: int = 1) -> NoReturn:
    """End the command with one line on standard error, without the middle of a very long one."""
    line = " ".join(in_words(error).split())
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 2 :]}"
    typer.echo(f"kvasir: {line}", err=True)
    raise typer.Exit(exit_code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line for an error of ours, a ValueError or an OSError."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package == "kvasir" or isinstance(error, ValueError | OSError):
            fail(error)
        raise


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console without markup, and without colours where the environment says so."""
    colors: Literal["auto"] | None = None if Console().no_color else "auto"
    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False, color_system=colors)


def show(
    as_json: bool,
    values: Mapping[str, Any],
    *parts: RenderableType,
    then: Sequence[str | Path] = (),
) -> None:
    """Print a result: `values` for a script, or `parts` for people.

    then: the command to type next, for those who sit at a terminal.
    """
    if as_json:
        typer.echo(json.dumps(values))
        return
    screen = console()
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, str | Text))
    if then and screen.is_terminal:
        line = shlex.join(["kvasir", *map(str, then)])
        screen.print(Text.assemble("next: ", (line, "bold")), soft_wrap=True)


def make_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with names on the left and figures on the right; an empty header is hidden."""
    table = Table(title=Text(title), show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def size_in_words(n_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    return ByteSize(n_bytes).human_readable(separator=" ")


def cost_since(started: float) -> tuple[dict[str, float], str]:
    """Return the seconds since a time and the most memory of this process: as JSON, in words."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = peak if sys.platform == "darwin" else peak * 1024
    seconds = monotonic() - started
    words = f"{seconds:.1f} s, {size_in_words(memory)} of memory at most"
    return {"seconds": seconds, "peak_memory_bytes": memory}, words
