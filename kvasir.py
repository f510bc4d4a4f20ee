"""The command: train, export, verify, serve, generate, bench. Each calls its room, imported when it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def command() -> None:
    """Train a decoder language model, export it to ONNX, serve it. Start with: kvasir serve examples/stdlib"""


def fail(error: object) -> NoReturn:
    """End with one line on standard error."""
    typer.echo(f"kvasir: {error}", err=True)
    raise typer.Exit(1)


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """`name=value` pairs for the decoder's configuration; whole numbers, numbers, true and false are recognised."""
    parsed: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            fail(f"--set takes name=value, not {change!r}")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; checkpoints, metrics.csv and loss.png go there.")],
    corpus: Annotated[list[Path] | None, typer.Argument(help="Text files, or folders of them.")] = None,
    preset: Annotated[str, typer.Option(help="Shape of the decoder.")] = "tiny",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the preset: name=value.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only files of folders whose path matches.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No files of folders whose path matches.")] = None,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of the text kept for evaluation.")] = 0.05,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    context: Annotated[int, typer.Option(min=8, help="Tokens a sequence.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in memory at once.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches a step.")] = 1,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    warmup: Annotated[int, typer.Option(min=1, help="Steps until the full learning rate.")] = 100,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.1,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
    seed: Annotated[int, typer.Option()] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its settings.")] = False,
) -> None:
    """Train a decoder on text: files, or folders of them."""
    from model import run
    from model.checkpoint import CheckpointError
    from model.config import preset as find_preset
    from model.train import TrainSettings

    console = Console()
    try:
        if resume:
            trainer = run.resume_run(out, console)
        elif not corpus:
            fail("name at least one file or folder to train on, or give --resume")
        else:
            config = find_preset(preset, **parse_changes(changes or []))
            settings = TrainSettings(
                steps=steps,
                context=context,
                batch_size=batch_size,
                accumulate=accumulate,
                learning_rate=learning_rate,
                warmup=warmup,
                weight_decay=weight_decay,
                seed=seed,
                evaluate_every=evaluate_every,
                checkpoint_every=checkpoint_every,
            )
            text = run.CorpusSettings(
                paths=corpus,
                include=include or ("*",),
                exclude=exclude or (),
                held_out=held_out,
                tokenizer=tokenizer,
            )
            trainer = run.start_run(out, text, config, settings, console)
        if not run.train(out, trainer, console):
            raise typer.Exit(130)
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        fail(error)


def main() -> None:
    """Entry point of the `kvasir` command."""
    app()
