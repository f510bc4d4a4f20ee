"""Options and arguments that several commands share, as types: their defaults differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvasir.model import directory
from kvasir.model.presets import PRESETS


def _check_text(text: str) -> str:
    try:
        text.encode()  # the shell passes any bytes
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{text!r} is not UTF-8 text") from None
    return text


def check_texts(texts: list[str]) -> list[str]:
    """Return texts of the command line; raises typer.BadParameter for one that is none."""
    return [_check_text(text) for text in texts]


def complete_precision(context: typer.Context) -> tuple[str, ...]:
    """Return the precisions of the device that is on the command line so far."""
    return directory.PRECISIONS[context.params.get("device", "cpu")]


_PRECISIONS = "int8 (default), int4 or fp32; for cuda bf16 (default), fp16, int8 or int4."

Json = Annotated[bool, Option("--json", help="Print one JSON object, and nothing else.")]
CacheDir = Annotated[
    Path | None,
    Option(envvar="KVASIR_CACHE_DIR", help="Folder of pulled models. Default: ~/.cache/kvasir."),
]
ModelDirectory = Annotated[Path, Argument(help="A model directory.")]
InputText = Annotated[str, Argument(callback=_check_text, help="The text that the model reads.")]
Preset = Annotated[
    str,
    Option(
        help=f"Shape of the network: {', '.join(PRESETS)}.", autocompletion=lambda: list(PRESETS)
    ),
]
Device = Annotated[directory.Device, Option(help="Device that the model runs on.")]
Precision = Annotated[str | None, Option(help=_PRECISIONS, autocompletion=complete_precision)]
Temperature = Annotated[float | None, Option(min=0.0, max=100.0, help="Of sampling; 0 is greedy.")]
TopK = Annotated[int | None, Option(min=0, help="Likeliest tokens to sample from; 0: from all.")]
TopP = Annotated[float | None, Option(min=1e-6, max=1.0, help="Share of probability to sample.")]
