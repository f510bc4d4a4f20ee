"""kvasir merge: a model and its adapter as one checkpoint."""

from __future__ import annotations

from pathlib import Path

from typer import Argument, Option

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import one_line_errors, show, size_in_words
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.commands.pull import on_this_machine


def merge(
    model: Path = Argument(help="A checkpoint, a Hugging Face folder, or hf://org/name."),
    adapter: Path = Argument(help="A run of train --lora, or a folder of peft."),
    out: Path = Option(help="The checkpoint to write."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Add a LoRA adapter to its model, and write both as a checkpoint, which export takes.

    The matrices that it changes are written in float32, all others as the model has them. A chat
    template beside the adapter replaces the model's.
    """
    with loading(quiet=as_json):
        from kvasir.model.checkpoint import load_checkpoint
        from kvasir.model.training.adapter import write_merged

    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        checkpoint = load_checkpoint(on_this_machine(model, cache_dir, progress))
        n_merged, notes = write_merged(checkpoint, adapter, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    values = {"directory": str(out), "merged": n_merged, "notes": notes, "bytes": size}
    wrote = f"wrote {out}: {n_merged} matrices were changed, {size_in_words(size)}"
    lines = (*(f"note: {note}" for note in notes), wrote)
    made = Path("artifacts", out.resolve().name)
    show(as_json, values, *lines, then=("export", out, "--out", made))
