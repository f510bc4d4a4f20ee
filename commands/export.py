"""kvasir export and kvasir verify."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from commands.output import Json, fail, mebibytes, peak_memory, show
from commands.progress import ProgressBar, loading
from model.bundle import PRECISIONS, Device, GenerationDefaults, Verification


def complete_precision(context: typer.Context, incomplete: str) -> list[str]:
    """The names that the shell offers: those of the device that the line has so far."""
    names = PRECISIONS[context.params.get("device", "cpu")]
    return [name for name in names if name.startswith(incomplete)]


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A training run, or a checkpoint directory.")],
    out: Annotated[Path, typer.Option(help="The model directory to write.")],
    device: Annotated[Device, typer.Option(help="What it is to run on.")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(
            help="int8 (default), int4 or fp32; for cuda bf16 (default), fp16, int8 or int4.",
            autocompletion=complete_precision,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="Keys and values on cuda: int8 or fp8.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure perplexity on this; default: held-out, or English.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Served requests' default.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Served requests' default.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=1e-6, max=1.0, help="Served requests' default.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="The longest row; default: the checkpoint's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a checkpoint to a model directory, and prove that it computes what PyTorch does."""
    with loading("PyTorch", quiet=as_json):
        from export.directory import export_checkpoint
        from export.verify import VerificationError
        from model.checkpoint import CheckpointError

    started = time.monotonic()
    generation = GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p)
    try:
        with ProgressBar(quiet=as_json) as progress:
            manifest = export_checkpoint(
                checkpoint,
                out,
                device=device,
                precision=precision,
                kv_cache=kv_cache,
                text=text,
                generation=generation,
                max_model_len=max_model_len,
                progress=progress,
            )
    except (CheckpointError, VerificationError, OSError, ValueError) as error:
        fail(error)
    size = sum(path.stat().st_size for path in out.iterdir())
    seconds, memory = time.monotonic() - started, peak_memory()
    values = {
        "directory": str(out),
        "device": manifest.device,
        "precision": manifest.precision,
        "parameters": manifest.parameters,
        "max_model_len": manifest.max_model_len,
        "bytes": size,
        "verification": manifest.verification.model_dump(),
        "seconds": seconds,
        "peak_memory_bytes": memory,
    }
    tables = _tables(out.name, exported=manifest.verification)
    made = f"{manifest.precision} for {manifest.device}, {mebibytes(size)}"
    show(
        as_json,
        values,
        *tables,
        f"{made}; took {seconds:.0f} s and {mebibytes(memory)} of memory at most",
    )


def verify(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The run or checkpoint it was exported from.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure perplexity on this; default: held-out text.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a model directory's hashes, and measure it against PyTorch again.

    What was rounded no longer holds the decoder's weights: it is measured only with --checkpoint.
    """
    with loading("PyTorch", quiet=as_json):
        from export.directory import SourceMismatchError, verify_directory
        from export.verify import VerificationError
        from model.bundle import BundleError
        from model.checkpoint import CheckpointError

    try:
        with ProgressBar(quiet=as_json) as progress:
            manifest, measured = verify_directory(directory, checkpoint, text, progress)
    except (
        BundleError,
        CheckpointError,
        SourceMismatchError,
        VerificationError,
        OSError,
        ValueError,
    ) as error:
        fail(error)
    noted = manifest.verification
    again = {} if measured is None else {"measured": measured}
    dumped = {name: figures.model_dump() for name, figures in again.items()}
    note = (
        f"hashes are right; {manifest.precision} is measured again against its source: --checkpoint"
    )
    values = {
        "directory": str(directory),
        "manifest": noted.model_dump(),
        "measured": None,
    } | dumped
    show(
        as_json,
        values,
        *_tables(directory.name, manifest=noted, **again),
        *([] if measured else [note]),
    )


def _tables(title: str, **columns: Verification) -> list[Table | Text]:
    """Figures side by side, a column for each set of them; below, what text each perplexity is on."""
    table = Table(title=Text(title))
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    forms = {
        "max_logit_error": ".4g",
        "greedy_agreement": ".1%",
        "perplexity_torch": ".4f",
        "perplexity_onnx": ".4f",
    }
    for key, form in forms.items():
        values = [getattr(column, key) for column in columns.values()]
        if any(value is not None for value in values):
            table.add_row(
                key.replace("_", " "),
                *("-" if value is None else f"{value:{form}}" for value in values),
            )
    return [
        table,
        *(Text(f"{name} on {column.text}") for name, column in columns.items() if column.text),
    ]
