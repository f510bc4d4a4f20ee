"""How `kvasir` as a whole ends: a mistake is one line on standard error, Ctrl-C is 130."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from model.files import in_words
from server.settings import plain

# What is missing where only a part of Kvasir is installed, and the extra that brings it.
_EXTRAS = {"onnxruntime": "cpu", "tensorboard": "tensorboard"} | dict.fromkeys(
    ("torch", "onnx", "onnx_ir", "safetensors", "matplotlib"), "train"
)
_ROOMS = ("export", "loadtest")  # images of the server leave them out


class CommandGroup(TyperGroup):
    """Typer's, which would draw a box around an error and show colours' other codes under NO_COLOR.

    Exit codes: 0, 1 for what failed, 2 for a command line or a setting that cannot be read, 130 for Ctrl-C; but 0 where
    that ends `serve`, which lets running requests finish.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.get("standalone_mode", True)
        if Console().no_color:
            from typer import rich_utils

            rich_utils.COLOR_SYSTEM = None
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except typer.TyperException as error:
            if message := error.format_message():
                typer.echo(f"kvasir: {_one_line(message)}{_hint(error)}", err=True)
            code = error.exit_code
        except ModuleNotFoundError as error:
            typer.echo(f"kvasir: {_missing(error)}", err=True)
            code = 1
        except OSError as error:
            typer.echo(
                f"kvasir: {'' if error.filename else 'standard output: '}{in_words(error)}",
                err=True,
            )
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for what is still to be written
            code = 1
        if standalone:
            sys.exit(code)
        return code


def _one_line(message: str) -> str:
    """Typer's sentences as one, in our voice: a small letter first, no full stop."""
    line = (
        plain(" ".join(message.split()))
        .replace("Value error, ", "")
        .replace(". Did you", "; did you")
        .rstrip(".?")
    )
    return line[:1].lower() + line[1:]


def _hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"; see {context.command_path} --help" if context is not None else ""


def _missing(error: ModuleNotFoundError) -> str:
    """The package, with the extra that brings it."""
    name = error.name or ""
    package = name.partition(".")[0]
    if package in _EXTRAS:
        return f"this needs {name}; install it with: pip install -c constraints.txt -e '.[{_EXTRAS[package]}]'"
    if package in _ROOMS:
        return f"this needs {package}/, which is not installed here; run it in a checkout of Kvasir"
    raise error
