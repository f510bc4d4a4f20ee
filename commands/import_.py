"""kvasir import: a Hugging Face checkpoint becomes a checkpoint directory."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from commands.options import Json
from commands.output import make_table, mebibytes, one_line_errors, peak_memory, show
from commands.progress import ProgressBar, loading


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The checkpoint directory to write.")],
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face checkpoint to a checkpoint directory."""
    with loading("PyTorch", quiet=as_json):
        from model.importing.huggingface import import_checkpoint

    started = time.monotonic()
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        imported = import_checkpoint(folder, out, progress)
    seconds, memory, config = time.monotonic() - started, peak_memory(), imported.config
    rows = {
        "family": imported.family,
        "layers": str(config.n_layer),
        "parameters": f"{imported.n_parameters:,}",
        "weights": imported.dtype,
        "vocabulary": f"{config.vocab_size:,} tokens",
        "max model len": f"{config.max_model_len:,} tokens",
        "chat template": "yes" if imported.has_chat_template else "no",
        "time": f"{seconds:.1f} s",
        "peak memory": mebibytes(memory),
    }
    values = {"directory": str(out), **asdict(imported)}
    values |= {"seconds": seconds, "peak_memory_bytes": memory}
    table = make_table(out.name, ("", ""), rows.items())
    show(as_json, values, table, *(f"note: {note}" for note in imported.notes))
