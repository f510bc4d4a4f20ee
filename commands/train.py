"""The command that trains, in one process or in as many as torchrun starts: the options are the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.output import complete_preset, console
from commands.progress import ProgressBar, loading
from model.files import in_words, writing

# May be given with --resume: where the run is, and how it is spread over the processes that continue it.
_WITH_RESUME = {"out", "resume", "shard"}


class OptionError(ValueError):
    """Options that do not go together, or one that cannot be read."""


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """`name=value` pairs for the decoder's configuration; whole numbers, numbers, true and false are recognised."""
    parsed: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise OptionError(f"--set takes name=value, not {change!r}")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def given_options(invocation: typer.Context) -> dict[str, str]:
    """What the command line names, by parameter: as it is called there."""
    given = {}
    for parameter in invocation.command.params:
        source = invocation.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            given[parameter.name or ""] = parameter.opts[0]
    return given


def refuse_changes_to_a_run(given: dict[str, str]) -> None:
    """A resumed run keeps its text and settings: what would change them is refused, not passed over."""
    if refused := [option for name, option in given.items() if name not in _WITH_RESUME]:
        raise OptionError(
            f"--resume continues the run with its own text and settings; leave out {', '.join(refused)}"
        )


def refuse_another_shape(given: dict[str, str], changes: dict[str, Any]) -> None:
    """A checkpoint's weights fit its own shape and tokenizer only."""
    refused = [given[name] for name in ("preset", "tokenizer") if name in given]
    refused += [f"--set {name}" for name in changes if name not in {"dropout", "attention_dropout"}]
    if refused:
        raise OptionError(
            f"--init brings the checkpoint's own shape and tokenizer; leave out {', '.join(refused)}"
        )


def refuse_fields_of_the_tokenizer(changes: dict[str, Any], tokenizer: Path | None) -> None:
    """Fields that the tokenizer decides would be overwritten."""
    decided = {"bos_token_id", "eos_token_ids"} | ({"vocab_size"} if tokenizer else set())
    for name in sorted(decided & changes.keys()):
        raise OptionError(f"{name} follows from the tokenizer; leave it out of --set")


def _check_seed(seed: int) -> int:
    """Rather than by a range, which help would show to its last digit."""
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"{seed} is not from 0 to 2**63 - 1")
    return seed


def train(
    invocation: typer.Context,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run; checkpoints, metrics.csv and loss.png go there."),
    ],
    corpus: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files, or folders of them; or chats: *.jsonl files."),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(help="Begin with the weights and tokenizer of this run or checkpoint."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="Shape of the decoder.", autocompletion=complete_preset)
    ] = "tiny",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the preset: name=value.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja template for chats. Default: the one that --init brings."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only files of folders whose path matches.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="No files of folders whose path matches.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the text kept for evaluation.")
    ] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 2000,
    context: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 256,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences at once, over all processes.")
    ] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches a step.")] = 1,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="The highest, after --warmup; it ends at a tenth.")
    ] = 1e-3,
    warmup: Annotated[int, typer.Option(min=1, help="Steps until the full learning rate.")] = 100,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of matrices (AdamW).")] = 0.1,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
    mixed_precision: Annotated[
        bool, typer.Option(help="Products in bfloat16 where hardware has it.")
    ] = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files, too.")
    ] = False,
    seed: Annotated[
        int, typer.Option(callback=_check_seed, help="Of weights, batches and dropout.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, with its settings.")
    ] = False,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard", help="Spread weights and optimizer over torchrun's processes (FSDP2)."
        ),
    ] = False,
) -> None:
    """Train a decoder on text, or on chats in JSONL files.

    A chat is a line of {"messages": [{"role": …, "content": …}, …]}.

    By several processes: torchrun --nproc-per-node N -m commands.train …
    """
    with loading("PyTorch"):
        from model.chat_template import ChatTemplateError
        from model.checkpoint import CheckpointError, load_checkpoint
        from model.config import ConfigError, DecoderConfig
        from model.config import preset as find_preset
        from model.tokenizer import TokenizerError
        from model.training import run
        from model.training.data import CorpusError
        from model.training.distributed import DistributedError, PeerError, ShardError, join
        from model.training.trainer import DivergedError, TrainSettings

    if tensorboard:
        import_module(
            "tensorboard"
        )  # so that a missing package shows before the corpus is prepared
    with join() as processes:
        lines = console(quiet=not processes.is_first)
        try:
            with processes.together(), writing(out):
                processes.check_shard(shard)
                if resume:
                    refuse_changes_to_a_run(given_options(invocation))
                elif not corpus:
                    raise OptionError(
                        "name at least one file or folder to train on, or give --resume"
                    )
                elif processes.is_first:
                    fields = parse_changes(changes or [])
                    processes.rows_per_process(batch_size)
                    if init is None:
                        refuse_fields_of_the_tokenizer(fields, tokenizer)
                        beginning, config = None, find_preset(preset, **fields)
                    else:
                        refuse_another_shape(given_options(invocation), fields)
                        beginning = load_checkpoint(init)
                        config = DecoderConfig.from_dict(
                            {**asdict(beginning.decoder.config), **fields}
                        )
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
                        mixed_precision=mixed_precision,
                        tensorboard=tensorboard,
                    )
                    text = run.CorpusSettings(
                        paths=corpus,
                        include=include or ("*",),
                        exclude=exclude or (),
                        held_out=held_out,
                        tokenizer=tokenizer,
                        chat_template=chat_template,
                    )
                    run.prepare_run(out, text, config, settings, lines, beginning)
            trainer = run.open_run(out, processes, shard=shard)
            if resume:
                message = f"resuming {out} at step {trainer.step} of {trainer.settings.steps}"
                lines.print(message, soft_wrap=True)
            with writing(out), ProgressBar(quiet=not processes.is_first) as progress:
                complete = run.train_run(out, trainer, lines, progress)
            if not complete:
                raise typer.Exit(130)
        except PeerError:
            raise typer.Exit(1) from None
        except (
            ChatTemplateError,
            CheckpointError,
            ConfigError,
            CorpusError,
            DistributedError,
            DivergedError,
            OptionError,
            OSError,
            TokenizerError,
        ) as error:
            if processes.is_first or not isinstance(
                error, DivergedError | ShardError
            ):  # which all raise at once
                typer.echo(f"kvasir: {in_words(error)}", err=True)
            raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(train)
