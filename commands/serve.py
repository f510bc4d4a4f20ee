"""kvasir serve."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ByteSize

from commands.output import fail
from server.settings import PREFIX, Settings


def _metavar(annotation: Any) -> str | None:
    """What kind of value it is, which `load_settings` reads: here all are texts, but for flags."""
    kind = next((one for one in get_args(annotation) if one is not type(None)), annotation)
    return {bool: None, int: "<int>", float: "<float>", ByteSize: "<size>", Path: "<path>"}.get(
        kind, "<str>"
    )


def _parameters() -> list[inspect.Parameter]:
    """`kvasir serve`'s argument, the model, and its options: one for each other setting."""
    parameters = []
    for name, field in Settings.model_fields.items():
        envvar = PREFIX + name.upper()
        kind: Any
        if name == "model":
            kind = Annotated[Path | None, typer.Argument(help=field.description, envvar=envvar)]
        else:
            told = field.default not in (None, "", False)
            help_text = (
                f"{field.description} Default: {field.default}." if told else field.description
            )
            option = typer.Option(
                help=help_text,
                envvar=envvar,
                show_envvar=False,
                show_default=False,
                metavar=_metavar(field.annotation),
            )
            kind = Annotated[bool | None if field.annotation is bool else str | None, option]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
    return parameters


def serve(**options: Path | str | bool | None) -> None:
    """Serve a model directory over HTTP.

    Every option is a variable, too: --max-num-seqs is KVASIR_MAX_NUM_SEQS.
    """
    from server.errors import StartupError
    from server.process.serve import serve as serve_model
    from server.settings import load_settings

    try:
        settings = load_settings(**options)
    except StartupError as error:
        fail(error, exit_code=2)
    try:
        serve_model(settings)
    except StartupError as error:
        fail(error)


serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
