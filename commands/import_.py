"""kvasir import: a published checkpoint becomes a checkpoint directory."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from typer import Argument, Option

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import cost_since, make_table, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.commands.pull import on_this_machine

_SOURCE = "A folder with config.json, *.safetensors and tokenizer.json, a .gguf file, or hf://…"


def import_(
    source: Path = Argument(help=_SOURCE),
    out: Path = Option(help="The checkpoint directory to write."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder or a GGUF file to a checkpoint directory.

    `kvasir export` reads either without this step.
    """
    with loading(quiet=as_json):
        from kvasir.model.importing.published import import_checkpoint

    started = time.monotonic()
    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        imported = import_checkpoint(on_this_machine(source, cache_dir, progress), out, progress)
    (cost, took), config = cost_since(started), imported.config
    rows = {
        "family": imported.family,
        "layers": str(config.n_layer),
        "parameters": f"{imported.n_parameters:,}",
        "weights": imported.dtype,
        "vocabulary": f"{config.vocab_size:,} tokens",
        "max model len": f"{config.max_model_len:,} tokens",
        "chat template": "yes" if imported.has_chat_template else "no",
        "took": took,
    }
    table = make_table(out.name, ("", ""), rows.items())
    values = {"directory": str(out), **asdict(imported), **cost}
    then = ("export", out, "--out", Path("artifacts", out.resolve().name))
    notes = (f"note: {note}" for note in imported.notes)
    show(as_json, values, table, *notes, f"wrote {out}", then=then)
