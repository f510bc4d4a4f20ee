"""A training run on disk: a fresh folder or a resumed one, watched through a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint, sync
from model.config import DecoderConfig
from model.data import DATA_FOLDER, Corpus, open_tokens, read_corpus, write_tokens
from model.decoder import Decoder
from model.distributed import Processes
from model.metrics import METRICS_FILE, plot_losses
from model.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer, vocabulary_size
from model.trainer import Trainer, TrainSettings

PICTURE_FILE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Which text to train on, and how it becomes tokens. held_out: the share that training never sees."""

    paths: Sequence[Path]
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    held_out: float = 0.05
    tokenizer: Path | None = None


class ProgressBar:
    """Loss, tokens per second, model FLOPs utilisation and time left while training; above the bar, evaluations and
    samples.
    """

    def __init__(self, console: Console, completed: int, steps: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f} · {task.fields[speed]:,.0f} tokens/s ·"),
            TextColumn("MFU {task.fields[mfu]:.1%} ·"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps, completed=completed, loss=0.0, speed=0.0, mfu=0.0)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float, mfu: float) -> None:
        self._bar.update(self._task, completed=step, loss=loss, speed=tokens_per_second, mfu=mfu)

    def evaluated(self, step: int, held_out_loss: float, prompt: str, sample: str) -> None:
        self._console.print(f"[bold]step {step}[/bold]  held-out loss {held_out_loss:.4f}")
        if sample:
            self._console.print(f"{prompt!r} … {sample!r}", style="dim", markup=False, highlight=False)


def prepare_run(
    folder: Path, corpus: CorpusSettings, config: DecoderConfig, settings: TrainSettings, console: Console
) -> None:
    """Write what a run starts from: token shards, and a checkpoint of step 0 with tokenizer and random weights.

    `config.vocab_size` is the size to train the tokenizer to; the decoder gets the size it came to. Raises CorpusError
    or TokenizerError before anything is written, and FileExistsError when the folder is in use.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; continue it with --resume or choose another --out")
    documents = read_corpus(corpus.paths, corpus.include, corpus.exclude, settings.seed)
    console.print(_describe(documents))
    if corpus.tokenizer is None:
        tokenizer = train_tokenizer(documents.texts, config.vocab_size)
    else:
        tokenizer = load_tokenizer(corpus.tokenizer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    config = replace(
        config,
        vocab_size=vocabulary_size(tokenizer),
        max_model_len=max(config.max_model_len, settings.context),
        bos_token_id=end,
        eos_token_ids=() if end is None else (end,),
    )
    torch.manual_seed(settings.seed)
    decoder = Decoder(config)
    data = write_tokens(documents, tokenizer, folder / DATA_FOLDER, held_out=corpus.held_out, context=settings.context)
    console.print(
        f"{data.n_train:,} tokens to train on, {len(data.held_out):,} held out; vocabulary {config.vocab_size:,}; "
        f"{decoder.n_parameters:,} parameters"
    )
    sync(*data.folder.iterdir(), data.folder)
    Trainer(decoder, tokenizer, data, settings).save(folder)  # from here on, whatever ends the run, it can be resumed


def open_run(folder: Path, processes: Processes, *, shard: bool = False) -> Trainer:
    """Continue a run where its newest checkpoint left it, with the settings it was started with.

    Raises CheckpointError, CorpusError or DistributedError, or PeerError where another of the processes does.
    """
    with processes.together():
        checkpoint = load_checkpoint(folder)
        if not checkpoint.progress:
            raise CheckpointError(f"{checkpoint.path} was not written by a training run, so there is nothing to resume")
        data = open_tokens(folder / DATA_FOLDER)
        try:
            settings = TrainSettings(**checkpoint.progress["settings"])
        except (KeyError, TypeError) as error:
            raise _not_whole(checkpoint, error) from None
        processes.share(settings.batch_size)
    trainer = Trainer(
        checkpoint.decoder,
        checkpoint.tokenizer,
        data,
        settings,
        extra_files=checkpoint.extra_files,
        processes=processes,
        shard=shard,
    )
    try:
        trainer.restore(checkpoint.path, checkpoint.progress)
    except (KeyError, TypeError) as error:
        raise _not_whole(checkpoint, error) from None
    return trainer


def _not_whole(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}'s training.json is not whole ({error}); it cannot be resumed")


def train(folder: Path, trainer: Trainer, console: Console) -> bool:
    """Train to the end or to Ctrl-C (False), then draw the loss curve."""
    with ProgressBar(console, trainer.step, trainer.settings.steps) as bar:
        complete = trainer.run(folder, bar)
    with trainer.processes.together():  # torchrun ends those that have not left when one has
        if trainer.processes.is_first:
            plot_losses(folder / METRICS_FILE, folder / PICTURE_FILE)
    if not complete:
        message = f"stopped and saved at step {trainer.step}; continue with: kvasir train --resume --out {folder}"
        console.print(message, soft_wrap=True, markup=False)
    return complete


def _describe(corpus: Corpus) -> str:
    skipped = f" ({corpus.n_skipped} files are not text and were passed over)" if corpus.n_skipped else ""
    return f"{len(corpus.texts):,} documents, {corpus.n_bytes / 1e6:.1f} MB of text{skipped}"
