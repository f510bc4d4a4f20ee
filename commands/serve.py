"""kvasir serve: an option for each setting of the server."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvasir.commands.console.output import fail
from kvasir.commands.pull import served_directory
from kvasir.server.errors import StartupError
from kvasir.server.setting_values import shown_default
from kvasir.server.settings import PREFIX, Settings, load_settings

_EXAMPLE = Path(__file__).parents[1] / "stdlib"
_METAVARS = {int: "<int>", float: "<float>", ByteSize: "<size>"}
_MOST_SHOWN = 4  # choices in place of a type; more stand in the help
# The panels of the help, in their order.
_PANELS = {
    "Model": "models_dir keep_alive cache_dir precision served_model_name max_model_len adapter "
    "adapter_dir tool_call_format reasoning_format",
    "Address and access": "host port root_path api_key api_key_file adapter_admin_key "
    "models_admin_key allowed_hosts cors_origins",
    "Speed and memory": "max_num_seqs threads kernels kv_cache_memory prefix_cache_memory "
    "prefix_dir prefix_dir_bytes share_prefix_cache adapter_memory models_memory chunk_size "
    "itl_target_ms speculate cuda_graphs",
    "Limits": "max_queue max_body_bytes default_timeout_ms send_timeout drain_timeout "
    "exit_on_failure",
    "Routes": "explain batch_dir batch_dir_bytes stored_responses_memory",
    "Replicas": "salt salt_file state_url state_url_file kv_events kv_events_replay",
    "Logs and traces": "log_level log_format otlp_endpoint",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


def serve(**options: list[Path] | list[str] | Path | str | bool | None) -> None:
    """Serve a model directory over HTTP, or several; without one an example, which writes Python.

    A checkpoint, a Hugging Face folder, a .gguf file and a model of a store are exported once.

    Every option is an environment variable, too: --max-num-seqs is KVASIR_MAX_NUM_SEQS.
    """
    options["adapter"] = options["adapter"] or None
    folder = options["models_dir"] or os.environ.get(f"{PREFIX}MODELS_DIR")
    if not (options["model"] or folder) and f"{PREFIX}MODEL" not in os.environ:
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
    envvar, about = PREFIX + name.upper(), str(field.description)
    default: Any
    kind: Any = field.annotation
    if get_origin(kind) is not Literal:
        kind = next(iter(get_args(kind)), kind)
    if name == "model":  # the environment's is split by commas, not as Typer would
        default = typer.Argument(None, help=f"{about} [env var: {envvar}, comma-separated]")
        kind = list[Path]
    elif name == "adapter":  # as above
        default = typer.Option(
            None,
            help=f"{about} Repeat it, or separate them by commas.",
            metavar="<name=path>",
            rich_help_panel=_PANEL_OF[name],
        )
        kind = list[str]
    else:
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        metavar = _METAVARS.get(kind)
        if choices and len(choices) <= _MOST_SHOWN:
            metavar = f"<{'|'.join(choices)}>"
        elif choices:
            about += f" One of {', '.join(choices)}."
        if field.default and "Default:" not in about:
            about += f" Default: {shown_default(field.default)}."
        panel = _PANEL_OF[name]
        default = typer.Option(
            None,
            help=about,
            envvar=envvar,
            show_envvar=False,
            metavar=metavar,
            rich_help_panel=panel,
        )
    annotation = (kind if kind in (bool, Path, list[Path], list[str]) else str) | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


# Typer reads a function's signature and its annotations.
_SIGNATURE = inspect.Signature(
    [_parameter(name, Settings.model_fields[name]) for name in ("model", *_PANEL_OF)]
)
serve.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
serve.__annotations__ = {
    parameter.name: parameter.annotation for parameter in _SIGNATURE.parameters.values()
}
