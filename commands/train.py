"""kvasir train: training in this process, or in each of those that torchrun starts."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer import Argument, Option

from kvasir.commands.console.options import Preset
from kvasir.commands.console.output import console, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar, loading
from kvasir.commands.pull import on_this_machine
from kvasir.model.download.reference import Reference
from kvasir.model.platform.files import writing
from kvasir.model.platform.progress import Progress
from kvasir.model.training.settings import Schedule

# Options that --resume allows: where the run is, and how the processes share it.
_WITH_RESUME = {"out", "resume", "shard"}
_LABEL_SMOOTHING = 0.1  # Vaswani et al. 2017, section 5.4
_WITH_INIT = {"dropout", "attention_dropout", "pooling"}  # changes that weights allow
# With which Sentence-BERT (Reimers & Gurevych 2019) tunes BERT. A rate of pre-training would soon
# undo what a published model has learned from far more text.
_PUBLISHED_LEARNING_RATE = 2e-5
_ADAPTER_LEARNING_RATE = 2e-4  # Hu et al. 2022, appendix D: of GPT-3's adapters


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**63:  # not Typer's range: help would show its last digit
        raise typer.BadParameter(f"{seed} is not from 0 to 2**63 - 1")
    return seed


def _given_options(invocation: typer.Context) -> dict[str, str]:
    """Return the options on the command line: by parameter, the name as written there."""
    names = {parameter.name or "": parameter.opts[0] for parameter in invocation.command.params}
    sources = ((key, invocation.get_parameter_source(key)) for key in names)
    return {key: names[key] for key, source in sources if source and source.name == "COMMANDLINE"}


def _parse_changes(changes: list[str]) -> dict[str, Any]:
    """Parse `name=value` pairs: a value is JSON, or else text."""
    parsed: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, not {change!r}")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def train(
    invocation: typer.Context,
    out: Path = Option(help="Folder of the run: checkpoints, metrics.csv, loss.png."),
    corpus: list[Path] | None = Argument(
        None, help="Text files or folders; or chats, pairs, labelled texts: *.jsonl, *.tsv."
    ),
    init: Path | None = Option(None, help="Run, checkpoint or model, also hf://…, to start from."),
    lora: str | None = Option(
        None, help="Train an adapter of --init: r=16[,alpha=32,modules=q_proj+v_proj,rslora]."
    ),
    preset: Preset = "tiny",
    changes: list[str] | None = Option(None, "--set", help="Change a preset's field: name=value."),
    tokenizer: Path | None = Option(None, help="A tokenizer.json. Default: train one."),
    chat_template: Path | None = Option(None, help="Jinja template for chats. Default: --init's."),
    include: list[str] | None = Option(None, help="Globs to take from folders."),
    exclude: list[str] | None = Option(None, help="Globs to skip in folders."),
    held_out: float = Option(0.05, min=0.0, max=0.5, help="Share to evaluate on."),
    steps: int | None = Option(
        None, min=1, help="Updates of the weights. Default: by the size of text and network."
    ),
    context: int = Option(256, min=1, help="Tokens per sequence."),
    batch_size: int = Option(16, min=1, help="Sequences per batch, in all processes."),
    accumulate: int = Option(1, min=1, help="Batches per step."),
    learning_rate: float | None = Option(
        None,
        min=0.0,
        help="Peak, after --warmup. Default: 1e-3; with --lora 2e-4; from a published model 2e-5.",
    ),
    schedule: Schedule = Option("cosine", help="Fall of it: to a tenth, or as 1 / sqrt(step)."),
    warmup: int = Option(100, min=1, help="Steps until the full learning rate."),
    weight_decay: float = Option(0.1, min=0.0, help="Of matrices, by AdamW."),
    label_smoothing: float | None = Option(
        None, min=0.0, max=0.99, help="Of an encoder-decoder's targets. Default: 0.1."
    ),
    evaluate_every: int | None = Option(
        None, min=1, help="Steps between evaluations. Default: a fifth of all, at most 250."
    ),
    checkpoint_every: int = Option(250, min=1, help="Steps between checkpoints."),
    mixed_precision: bool = Option(True, help="Use bfloat16 if hardware has it."),
    compile: bool = Option(  # noqa: A002  the option's name
        True, help="Compile the network where that is worth its time, and there is a C++ compiler."
    ),
    tensorboard: bool = Option(False, "--tensorboard", help="Write event files too."),
    seed: int = Option(0, callback=_check_seed, help="Seed of weights, batches and dropout."),
    resume: bool = Option(False, "--resume", help="Continue the run in --out as it is."),
    shard: bool = Option(False, "--shard", help="Shard the decoder over the processes (FSDP2)."),
) -> None:
    """Train a decoder on text or chats, an encoder on text or pairs, an encoder-decoder on pairs.

    Decoders and encoders also become classifiers, by lines of {"text": …, "label": …}.
    A chat is a line of JSON, {"messages": [{"role": …, "content": …}, …]}. An encoder's pair is one
    of {"query": …, "document": …}, or of "anchor" and "positive", and may have a "negative". An
    encoder-decoder's is {"source": …, "target": …} or, in *.tsv, a source, a tab and its target.

    In several processes: torchrun --nproc-per-node N -m kvasir.commands.train …
    """
    _train(locals(), _given_options(invocation))


def _train(options: dict[str, Any], given: dict[str, str]) -> None:
    """Begin or continue a run. given: the options of the command line, by name."""
    out, shard, resume = options["out"], options["shard"], options["resume"]
    with loading():
        from kvasir.model.training import run
        from kvasir.model.training.distributed import PeerError, ShardError, join
        from kvasir.model.training.trainer import DivergedError

    if options["tensorboard"]:
        import_module("tensorboard")  # fails here, before the corpus is prepared
    with join() as processes, one_line_errors():
        is_first = processes.is_first
        lines = console(quiet=not is_first)
        try:
            with processes.together(), writing(out):
                processes.check_shard(shard)
                if resume:
                    refused = [name for key, name in given.items() if key not in _WITH_RESUME]
                    _refuse("--resume continues the run with its own text and settings", refused)
                elif not options["corpus"]:
                    message = "name at least one file or folder to train on, or give --resume"
                    raise ValueError(message)
                elif is_first:
                    processes.rows_per_process(options["batch_size"])
                    with ProgressBar(takes_minutes=True) as preparing:
                        _prepare_run(options, given, preparing.lines, preparing)
            trainer = run.open_run(out, processes, shard=shard)
            if resume:
                message = f"resuming {out} at step {trainer.step} of {trainer.settings.steps}"
                lines.print(message, soft_wrap=True)
            with writing(out), ProgressBar(quiet=not is_first) as progress:
                complete = run.train_run(out, trainer, progress.lines, progress)
            if not complete:
                raise typer.Exit(130)
            if is_first:
                made = Path("artifacts", out.resolve().name)
                if trainer.base is None:
                    show(False, {}, then=("export", out, "--out", made))
                else:
                    show(False, {}, then=("merge", trainer.base["path"], out, "--out", made))
        except (DivergedError, PeerError, ShardError) as error:  # all processes raise one at once
            if isinstance(error, PeerError) or not is_first:
                raise typer.Exit(1) from None
            raise


def _prepare_run(
    options: dict[str, Any], given: dict[str, str], lines: Console, progress: Progress
) -> None:
    """Write the run that the options of `train` describe. They are named as fields of settings."""
    from kvasir.model.adapters.config import AdapterConfig
    from kvasir.model.checkpoint import load_checkpoint
    from kvasir.model.config import TransformerConfig
    from kvasir.model.presets import preset
    from kvasir.model.training.adapter import NewAdapter
    from kvasir.model.training.data.documents import CorpusSettings
    from kvasir.model.training.preparation import prepare_run
    from kvasir.model.training.settings import TrainSettings

    changes, checkpoint = _parse_changes(options["changes"] or []), None
    adapter = None
    if options["init"] is None:
        if options["lora"] is not None:
            raise ValueError("--lora trains an adapter of a model; name that with --init")
        by_tokenizer = {"bos_token_id", "eos_token_ids"}
        by_tokenizer |= {"vocab_size"} if options["tokenizer"] else set()
        for name in sorted(by_tokenizer & changes.keys()):
            raise ValueError(f"{name} follows from the tokenizer; leave it out of --set")
        config = preset(options["preset"], **changes)
    else:
        refused = [given[name] for name in ("preset", "tokenizer") if name in given]
        refused += [f"--set {name}" for name in changes if name not in _WITH_INIT]
        _refuse("--init brings the checkpoint's own shape and tokenizer", refused)
        checkpoint = load_checkpoint(on_this_machine(options["init"], None, progress))
        config = TransformerConfig(**(asdict(checkpoint.config) | changes))
        for note in checkpoint.notes:
            lines.print(f"note: {note}", soft_wrap=True)
        if options["lora"] is not None:
            reference, base = Reference.parse(options["init"]), str(checkpoint.path.resolve())
            if reference is not None and reference.scheme == "hf":
                base = reference.name
            described = AdapterConfig.parse(options["lora"], base)
            adapter = NewAdapter.make(checkpoint, described, options["seed"])
    chosen = {name: value for name, value in options.items() if value not in (None, [])}
    if adapter is not None:
        chosen = {"learning_rate": _ADAPTER_LEARNING_RATE} | chosen
    elif checkpoint is not None and not checkpoint.progress:  # it comes from no run of `train`
        chosen = {"learning_rate": _PUBLISHED_LEARNING_RATE} | chosen
    corpus, settings = (
        {field.name: chosen[field.name] for field in fields(kind) if field.name in chosen}
        for kind in (CorpusSettings, TrainSettings)
    )
    source = CorpusSettings(paths=options["corpus"], **corpus)
    if config.encoder is not None:
        settings.setdefault("label_smoothing", _LABEL_SMOOTHING)
    elif "label_smoothing" in settings:
        raise ValueError("--label-smoothing is for an encoder-decoder; leave it out")
    made = TrainSettings(**{"steps": 0, "evaluate_every": 0} | settings)  # 0: as the corpus says
    prepare_run(options["out"], source, config, made, lines, checkpoint, progress, adapter)


def _refuse(reason: str, options: list[str]) -> None:
    if options:
        raise ValueError(f"{reason}; leave out {', '.join(options)}")


if __name__ == "__main__":
    typer.run(train)
