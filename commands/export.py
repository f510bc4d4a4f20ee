"""kvasir export and kvasir eval: a model directory, and its measurements against PyTorch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from kvasir.commands.console.options import (
    CacheDir,
    Device,
    Json,
    ModelDirectory,
    Precision,
    Temperature,
    TopK,
    TopP,
)
from kvasir.commands.console.output import (
    cost_since,
    make_table,
    one_line_errors,
    show,
    size_in_words,
)
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.commands.pull import on_this_machine
from kvasir.model.records import GenerationDefaults, LayerFigures, SpanFigures, Verification

_TEXT = Option(None, help="Text for perplexity. Default: held-out text, or English.")
_SOURCE = "A training run, a checkpoint, a Hugging Face folder, a .gguf file, or hf://org/name."
_SHOWN = {"device", "precision", "parameters", "max_model_len", "verification"}
_FORMATS = {
    "mean_kl": ".2e",
    "kl_99": ".2e",
    "max_logit_error": ".4g",
    "greedy_agreement": ".1%",
    "near_ties": ",",
    "perplexity_torch": ".4f",
    "perplexity_onnx": ".4f",
    "perplexity_error": ".2%",
    "mean_cosine": ".6f",
    "least_cosine": ".6f",
    "retrieval_torch": ".1%",
    "retrieval_onnx": ".1%",
    "retrieval_error": ".2%",
    "exact_match_torch": ".1%",
    "exact_match_onnx": ".1%",
    "exact_match_error": ".2%",
    "positions": ",",
    "longest": ",",
    "error_growth": ".2f",
}


def export(
    checkpoint: Path = Argument(help=_SOURCE),
    out: Path = Option(help="The model directory to write."),
    device: Device = "cpu",
    precision: Precision = None,
    kv_cache: str | None = Option(None, help="KV cache on cuda: int8 or fp8."),
    int8_prompts: bool = Option(True, help="Keep int8 weights in int4 too, for prompts."),
    bits: float | None = Option(
        None,
        help="Bits a weight in int4, 4.5 to 8, of linear layers outside experts, and not of those "
        "rounded to 4 bits before. Default: 4.85.",
    ),
    text: Path | None = _TEXT,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    max_model_len: int | None = Option(None, min=2, help="Longest sequence. Default: unchanged."),
    calibrate: Path | None = Option(
        None, help="Text, or chats in JSONL, to calibrate rounding on. Default: part of --text's."
    ),
    calibration: bool = Option(True, help="Smooth outliers before rounding, at no cost later."),
    force: bool = Option(False, "--force", help="Replace the model directory at --out, if made."),
    verbose: bool = Option(False, "--verbose", "-v", help="Print every figure, not the verdict."),
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Export a model to a model directory, and verify it against PyTorch.

    Sampling options become the defaults of served requests. Where Kvasir's own operators compute a
    model, the manifest has a digest of its answers, which `kvasir doctor` compares.
    """
    with loading(quiet=as_json, takes_minutes=True):
        from kvasir.export.directory import export_checkpoint
        from kvasir.server.engine.digest import write_digest

    started = time.monotonic()
    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        manifest, notes = export_checkpoint(
            on_this_machine(checkpoint, cache_dir, progress),
            out,
            device=device,
            precision=precision,
            kv_cache=kv_cache,
            int8_prompts=int8_prompts,
            bits=bits,
            text=text,
            generation=GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p),
            max_model_len=max_model_len,
            calibrate=calibrate,
            smooths=calibration,
            replaces=force,
            progress=progress,
        )
        if device == "cpu" and manifest.architecture == "kvasir-decoder":
            progress("computing a digest of answers", 0, 0)
            if reason := write_digest(out):
                notes += (f"the manifest has no digest of answers: {reason}",)
    size = sum(path.stat().st_size for path in out.iterdir())
    verdict = manifest.verification.verdict
    cost, took = cost_since(started)
    values = {"directory": str(out), **manifest.model_dump(include=_SHOWN), "bytes": size}
    values |= {"notes": notes, "verdict": verdict}
    made = f"{manifest.precision} for {manifest.device}, {size_in_words(size)}; took {took}"
    figures = _tables(out.name, exported=manifest.verification) if verbose else []
    lines = (*(f"note: {note}" for note in notes), verdict, f"wrote {out}: {made}")
    show(as_json, values | cost, *figures, *lines, then=("serve", out))


def evaluate(
    directory: ModelDirectory,
    against: Path | None = Option(None, help="What it was exported from."),
    text: Path | None = _TEXT,
    by_layer: bool = Option(False, "--by-layer", help="Measure each layer alone too."),
    plot: Path | None = Option(None, help="A picture to write: the loss by position."),
    as_json: Json = False,
) -> None:
    """Check a model directory's hashes, and measure what it loses against PyTorch.

    Rounded weights need --against: the directory does not hold the decoder's own.
    """
    with loading(quiet=as_json):
        from kvasir.export.evaluation import verify_directory

    with one_line_errors(), ProgressBar(quiet=as_json, takes_minutes=True) as progress:
        manifest, measured, problem = verify_directory(
            directory, against, text, progress, by_layer=by_layer
        )
    columns = {"manifest": manifest.verification} | ({"measured": measured} if measured else {})
    parts = _tables(directory.name, **columns)
    if measured is None:
        note = f"hashes are right; to measure {manifest.precision} again, give it --against"
        parts.append(Text(f"{note} its checkpoint"))
    figures = measured or manifest.verification
    with one_line_errors():
        if figures.by_position:
            parts.append(_by_position(figures.by_position))
        if figures.by_layer:
            parts.append(_by_layer(figures.by_layer))
        if plot is not None:
            from kvasir.commands.console.pictures import draw_losses

            draw_losses(
                f"{directory.name} in {manifest.precision}", figures.by_position or [], plot
            )
    parts.append(Text(f"{directory.name}: {figures.verdict}"))
    values: dict[str, Any] = {
        "directory": str(directory),
        "manifest": manifest.verification.model_dump(),
        "measured": measured and measured.model_dump(),
        "verdict": figures.verdict,
    }
    show(as_json, values, *parts, then=() if problem else ("serve", directory))
    with one_line_errors():
        if problem is not None:
            raise problem


def _by_position(spans: Sequence[SpanFigures]) -> Table:
    rows = [
        (
            f"{span.first:,} to {span.last:,}",
            *(f"{span.tokens:,}", f"{span.mean_kl:.2e}", f"{span.kl_99:.2e}"),
            f"{span.greedy_agreement:.1%}",
        )
        for span in spans
    ]
    return make_table("by position", ("position", "tokens", "mean kl", "kl 99", "agreement"), rows)


def _by_layer(layers: Sequence[LayerFigures]) -> Table:
    rows = [(of.layer, f"{of.mean_kl:.2e}", f"{of.error:.2%}", f"{of.gain:.4f}") for of in layers]
    return make_table("by layer, alone", ("", "mean kl", "error", "gain"), rows)


def _tables(title: str, **columns: Verification) -> list[Table | Text]:
    """Return a table of measurements, a column for each set; below, the text of each perplexity."""
    for name, column in list(columns.items()):
        if column.own is not None:
            columns[f"{name} (own operators)"] = column.own
    rows = []
    for key, form in _FORMATS.items():
        values = [getattr(column, key) for column in columns.values()]
        if any(value is not None for value in values):
            cells = ("-" if value is None else f"{value:{form}}" for value in values)
            rows.append((key.replace("_", " "), *cells))
    texts = [Text(f"{name} on {column.text}") for name, column in columns.items() if column.text]
    return [make_table(title, ("", *columns), rows), *texts]
