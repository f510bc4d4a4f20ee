"""kvasir serve: an option for each setting of the server."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvasir.commands.console.output import fail
from kvasir.commands.pull import served_directory
from kvasir.server.errors import StartupError
from kvasir.server.settings import PREFIX, Settings, load_settings

_EXAMPLE = Path(__file__).parents[1] / "stdlib"
_METAVARS = {int: "<int>", float: "<float>", ByteSize: "<size>"}


def serve(**options: list[Path] | Path | str | bool | None) -> None:
    """Serve a model directory over HTTP, or several; without one an example, which writes Python.

    A checkpoint, a Hugging Face folder, a .gguf file and a model of a store are exported once.

    Every option is an environment variable, too: --max-num-seqs is KVASIR_MAX_NUM_SEQS.
    """
    if not options["model"] and f"{PREFIX}MODEL" not in os.environ:
        options["model"] = [_EXAMPLE]
    try:
        settings = load_settings(**options | {"model": options["model"] or None})
        directories = [
            served_directory(
                model, settings.served_model_name, settings.cache_dir, settings.precision
            )
            for model in settings.model
        ]
        if directories != [*settings.model]:
            settings = load_settings(**options | {"model": directories})
    except StartupError as error:
        fail(error, exit_code=2)
    from kvasir.server.process.serve import serve as serve_model

    try:
        serve_model(settings)
    except StartupError as error:
        fail(error)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a setting: a path, a flag, or a string for `load_settings`."""
    envvar, about = PREFIX + name.upper(), field.description
    default: Any
    kind: Any = next(iter(get_args(field.annotation)), field.annotation)
    if name == "model":  # the environment's is split by commas, not as Typer would
        default = typer.Argument(None, help=f"{about} [env var: {envvar}, comma-separated]")
        kind = list[Path]
    else:
        about = f"{about} Default: {field.default}." if field.default else about
        metavar = _METAVARS.get(kind)
        default = typer.Option(None, help=about, envvar=envvar, show_envvar=False, metavar=metavar)
    annotation = (kind if kind in (bool, Path, list[Path]) else str) | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


# Typer reads a function's signature and its annotations.
_SIGNATURE = inspect.Signature([_parameter(*item) for item in Settings.model_fields.items()])
serve.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
serve.__annotations__ = {
    parameter.name: parameter.annotation for parameter in _SIGNATURE.parameters.values()
}
