"""Measure formats on trained decoders, and on the same with outliers: a table in Markdown.

python -m tests.rounding LIBRARIES RUN...: LIBRARIES is the folder of llama.cpp's. KL and agreement
are against PyTorch, by the exporter's own verification, of operators of our own where these are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from typer import echo, run

from kvasir.commands.console.progress import ProgressBar
from kvasir.export.directory import export_checkpoint
from kvasir.export.verification.samples import make_sample
from kvasir.export.verification.verify import Verifier
from kvasir.model.checkpoint import load_checkpoint, save_checkpoint
from kvasir.model.directory import WEIGHTS_FILE
from kvasir.model.platform.progress import Progress
from kvasir.model.records import Verification
from kvasir.model.training.data.tokens import DATA_FOLDER
from tests.kit.outliers import make_outliers
from tests.rounding.llama_cpp import FORMATS, GgufRun, LlamaCpp, write_model

# Precisions, and how `export_checkpoint` writes them.
PRECISIONS: dict[str, dict[str, Any]] = {
    "int8": {"precision": "int8"},
    "int8, `--no-calibration`": {"precision": "int8", "smooths": False},
    "int4": {"precision": "int4"},
    "int4, `--no-int8-prompts`": {"precision": "int4", "int8_prompts": False},
    "int4, `--no-int8-prompts --bits 4.5`": {
        "precision": "int4",
        "int8_prompts": False,
        "bits": 4.5,
    },
    "int4, `--no-int8-prompts --no-calibration`": {
        "precision": "int4",
        "int8_prompts": False,
        "smooths": False,
    },
}


class Cost(NamedTuple):
    """What a format costs a model, and its bytes."""

    figures: Verification
    n_bytes: int


def write_outliers(source: Path, out: Path) -> Path:
    """Write a run of the same function, with outliers wherever matrices read."""
    checkpoint = load_checkpoint(source)
    network = checkpoint.decoder
    make_outliers(network, checkpoint.config)
    tokenizer, notes = checkpoint.tokenizer, dict(checkpoint.progress)
    saved = save_checkpoint(out, int(notes["step"]), network, tokenizer, {}, notes)
    (out / DATA_FOLDER).symlink_to((checkpoint.path.parent / DATA_FOLDER).absolute())
    return saved


def costs(source: Path, library: LlamaCpp | None, progress: Progress) -> Iterator[tuple[str, Cost]]:
    """Yield the costs of all formats for a checkpoint."""
    with TemporaryDirectory() as name:
        for format_name, options in PRECISIONS.items():
            out = Path(name) / format_name.replace("`", "")
            # A cost beyond its limit is a result here.
            with mock.patch("kvasir.export.evaluation.check"):
                manifest, _ = export_checkpoint(source, out, progress=progress, **options)
            figures = manifest.verification.own or manifest.verification
            yield format_name, Cost(figures, (out / WEIGHTS_FILE).stat().st_size)
        if library is None:
            return
        checkpoint, whole = load_checkpoint(source), Path(name) / "whole.gguf"
        write_model(checkpoint.decoder, whole)
        sample = make_sample(checkpoint, None, "int8")
        verifier = Verifier(checkpoint.config, checkpoint.weights, sample)
        for kind in FORMATS:
            file = whole.with_name(f"{kind}.gguf")
            library.quantize(whole, file, kind)
            rounded = GgufRun(library, file, checkpoint.config.vocab_size)
            yield kind, Cost(verifier.verify(rounded.logits, progress), file.stat().st_size)


def table(results: dict[str, list[Cost]], names: list[str]) -> str:
    """Return a table: a line for each format, and three columns for each run."""
    heads = " | ".join(f"{name} | with outliers | MB" for name in names)
    lines = [f"| | {heads} |", "|---" * (1 + 3 * len(names)) + "|"]
    for kind, of_kind in results.items():
        cells = [f"{c.mean_kl:.5f}, {100 * c.greedy_agreement:.1f} %" for c, _ in of_kind]
        sizes = [f"{n_bytes / 1e6:.2f}" for _, n_bytes in of_kind]
        of_runs = zip(cells[::2], cells[1::2], sizes[::2], strict=True)
        lines.append(" | ".join([f"| {kind}", *(cell for run in of_runs for cell in run)]) + " |")
    return "\n".join(lines)


def main(libraries: Path, runs: list[Path]) -> None:
    """Measure runs, and print the table."""
    library, results = LlamaCpp(libraries), dict[str, list[Cost]]()
    with TemporaryDirectory() as folder, ProgressBar(takes_minutes=True) as progress:
        for source in runs:
            changed = write_outliers(source, Path(folder) / source.name)
            for version in (source, changed):
                for kind, cost in costs(version, library, progress):
                    results.setdefault(kind, []).append(cost)
                    line = f"{source.name} {kind}: {cost.figures.verdict}"
                    progress.lines.print(line, markup=False, highlight=False, soft_wrap=True)
                    gc.collect()
    n = next(iter(results.values()))[0].figures.positions
    echo(f"{n:,} positions.\n\n{table(results, [source.name for source in runs])}")


if __name__ == "__main__":
    run(main)
