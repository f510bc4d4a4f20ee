"""kvasir serve: an option for each setting of the server."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from commands.output import fail
from server.errors import StartupError
from server.settings import PREFIX, Settings, load_settings

_METAVARS = {int: "<int>", float: "<float>", ByteSize: "<size>", Path: "<path>"}


def serve(**options: Path | str | bool | None) -> None:
    """Serve a model directory over HTTP.

    Every option is an environment variable, too: --max-num-seqs is KVASIR_MAX_NUM_SEQS.
    """
    try:
        settings = load_settings(**options)
    except StartupError as error:
        fail(error, exit_code=2)
    from server.process.serve import serve as serve_model

    try:
        serve_model(settings)
    except StartupError as error:
        fail(error)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a setting: a flag, or a string for `load_settings`."""
    envvar = PREFIX + name.upper()
    annotation: Any = Annotated[Path | None, typer.Argument(help=field.description, envvar=envvar)]
    if name != "model":
        kind: Any = next(iter(get_args(field.annotation)), field.annotation)
        default = f" Default: {field.default}." if field.default not in (None, "", False) else ""
        option = typer.Option(
            help=f"{field.description}{default}",
            envvar=envvar,
            show_envvar=False,
            show_default=False,
            metavar=None if kind is bool else _METAVARS.get(kind, "<str>"),
        )
        annotation = Annotated[bool | None if kind is bool else str | None, option]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword_only, default=None, annotation=annotation)


# Typer reads a function's signature and its annotations.
_SIGNATURE = inspect.Signature([_parameter(*item) for item in Settings.model_fields.items()])
serve.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
serve.__annotations__ = {one.name: one.annotation for one in _SIGNATURE.parameters.values()}
