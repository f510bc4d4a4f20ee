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


def _annotation(name: str, field: FieldInfo) -> Any:
    """Return Typer's annotation of a setting: a flag, or a string for `load_settings`."""
    envvar = PREFIX + name.upper()
    if name == "model":
        return Annotated[Path | None, typer.Argument(help=field.description, envvar=envvar)]
    has_default = field.default not in (None, "", False)
    default = f" Default: {field.default}." if has_default else ""
    kinds = [one for one in get_args(field.annotation) if one is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    kind = getattr(kind, "__origin__", kind)  # of an Annotated one
    option = typer.Option(
        help=f"{field.description}{default}",
        envvar=envvar,
        show_envvar=False,
        show_default=False,
        metavar=None if kind is bool else _METAVARS.get(kind, "<str>"),
    )
    return Annotated[bool | None if kind is bool else str | None, option]


# Typer reads a function's signature and its annotations.
_ANNOTATIONS = {name: _annotation(name, field) for name, field in Settings.model_fields.items()}
serve.__annotations__ = _ANNOTATIONS
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _ANNOTATIONS.items()
    ]
)
