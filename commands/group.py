"""The end of a `kvasir` command: one line for a mistake, and the exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperGroup

from model.files import in_words
from server.settings import describe_fault

# The extra that brings a package which partial installations lack.
_EXTRAS = {"onnxruntime": "cpu", "tensorboard": "tensorboard"} | dict.fromkeys(
    ("torch", "onnx", "onnx_ir", "safetensors", "matplotlib"), "train"
)
_ROOMS = ("export", "loadtest")  # the server's images leave them out


class CommandGroup(TyperGroup):
    """Typer's group with errors in one line instead of a box, and no escape codes under NO_COLOR.

    Exit codes: 0; 1 for a failure; 2 for a command line or setting that cannot be read; 130 for
    Ctrl-C, except in `serve`, which drains and exits with 0.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run the command, and exit unless `standalone_mode` is false."""
        if Console().no_color:
            from typer import rich_utils

            rich_utils.COLOR_SYSTEM = None
        try:
            code = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
        except typer.TyperException as error:
            if message := _one_line(error):
                typer.echo(f"kvasir: {message}", err=True)
            code = error.exit_code
        except ModuleNotFoundError as error:
            typer.echo(f"kvasir: {_missing(error)}", err=True)
            code = 1
        except OSError as error:
            where = "" if error.filename else "standard output: "
            typer.echo(f"kvasir: {where}{in_words(error)}", err=True)
            # What is still buffered goes nowhere.
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            code = 1
        if standalone_mode:
            sys.exit(code)
        return code


def _one_line(error: typer.TyperException) -> str:
    """Return Typer's message in one line: lower case, no full stop, a pointer to the help."""
    if isinstance(error.__cause__, ValidationError):
        error.message = describe_fault(error.__cause__)
    line = " ".join(error.format_message().split()).replace(". Did you", "; did you").rstrip(".?")
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if line and context is not None else ""
    return line[:1].lower() + line[1:] + hint


def _missing(error: ModuleNotFoundError) -> str:
    """Return how to get the package. Raises the error again for an unknown one."""
    name = error.name or ""
    package = name.partition(".")[0]
    if package in _EXTRAS:
        command = f"pip install -c constraints.txt -e '.[{_EXTRAS[package]}]'"
        return f"this needs {name}; install it with: {command}"
    if package in _ROOMS:
        return f"this needs {package}/, which is not installed here; run it in a checkout of Kvasir"
    raise error
