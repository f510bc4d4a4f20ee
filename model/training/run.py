"""A training run on disk, from its newest checkpoint to its last step."""

from __future__ import annotations

import shlex
from functools import partial
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from kvasir.model.adapters.config import ADAPTER_FILE
from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import newest_checkpoint
from kvasir.model.training.adapter import open_adapter
from kvasir.model.training.data.masking import Masking
from kvasir.model.training.data.pairs import LabelData, PairData
from kvasir.model.training.data.tokens import DATA_FOLDER, TokenData, open_arrays
from kvasir.model.training.data.translations import TranslationData, held_out_file
from kvasir.model.training.distributed import Processes
from kvasir.model.training.metrics import (
    CONFUSION_FILE,
    METRICS_FILE,
    PICTURE_FILE,
    plot_confusion,
    plot_losses,
)
from kvasir.model.training.objectives import Classifying, Data
from kvasir.model.training.report import StepProgress, console_report, expected_time, print_held_out
from kvasir.model.training.settings import TrainSettings
from kvasir.model.training.trainer import Trainer


def open_run(folder: Path, processes: Processes, *, shard: bool = False) -> Trainer:
    """Return the trainer of a run at its newest checkpoint, with the settings it began with.

    Every process holds the whole decoder in CPU memory until it is spread. Raises AdapterError,
    CheckpointError, CorpusError or ValueError; PeerError where another process does.
    """
    with processes.together():
        step = newest_checkpoint(folder)
        is_adapter = step is not None and (step / ADAPTER_FILE).is_file()
        checkpoint = open_adapter(step) if step and is_adapter else load_checkpoint(folder)
        if not checkpoint.progress:
            reason = "was not written by a training run, so it cannot be resumed"
            raise CheckpointError(f"{checkpoint.path} {reason}")
        tokens = _open_data(folder / DATA_FOLDER, checkpoint.tokenizer, checkpoint.config)
        try:
            settings = TrainSettings(**checkpoint.progress["settings"])
            itemgetter("step", "seconds", "held_out_loss")(checkpoint.progress)
        except (KeyError, TypeError) as error:
            reason = f"training.json is incomplete ({error}); it cannot be resumed"
            raise CheckpointError(f"{checkpoint.path}'s {reason}") from None
        processes.rows_per_process(settings.batch_size)
    decoder, tokenizer = checkpoint.decoder, checkpoint.tokenizer
    files = checkpoint.extra_files | held_out_file(folder / DATA_FOLDER)
    base = checkpoint.progress.get("base")
    trainer = Trainer(decoder, tokenizer, tokens, settings, files, processes, shard, base)
    trainer.restore(checkpoint.path, checkpoint.progress)
    return trainer


def train_run(folder: Path, trainer: Trainer, lines: Console, progress: StepProgress) -> bool:
    """Train to the end, or to Ctrl-C (then return False), and draw the loss curve."""
    steps, data = trainer.settings.steps, trainer.data
    has_perplexity = isinstance(data, TokenData | TranslationData)
    progress("training", trainer.step, steps, "")
    report = console_report(lines, progress, steps, has_perplexity=has_perplexity)
    if trainer.step == 0 and not isinstance(data, TokenData):
        print_held_out(lines, 0, trainer.evaluate(), has_perplexity)
    tell = partial(lines.print, soft_wrap=True)

    processes = trainer.processes
    alone = processes.control is None and processes.device.type == "cpu"
    if trainer.settings.compile and trainer.step < steps and alone:
        tell("compiling the network, which takes up to a minute; --no-compile leaves it out")
        if problem := trainer.compile():
            tell(f"it is not compiled: {problem}")

    def forecast(seconds: float) -> None:
        if text := expected_time(seconds, trainer.step, steps, trainer.processes):
            tell(text)

    complete = trainer.train(folder, report, forecast)
    objective, pooling = trainer.objective, trainer.decoder.config.pooling
    found = objective.found if isinstance(objective, Classifying) else None
    written = [f"step-{trainer.step:08d}", METRICS_FILE, PICTURE_FILE]
    written += [] if found is None else [CONFUSION_FILE]
    # torchrun kills the others soon after one process has ended, so all wait for the picture.
    with trainer.processes.together():
        if trainer.processes.is_first:
            plot_losses(folder, has_perplexity=has_perplexity)
            if found is not None and pooling is not None:
                best, right = (part.cpu().numpy() for part in found)
                plot_confusion(folder, best, right, pooling.labels)
    tell(f"wrote {', '.join(str(folder / name) for name in written)}")
    if not complete:
        command = shlex.join(["kvasir", "train", "--resume", "--out", str(folder)])
        tell(f"stopped and saved at step {trainer.step}; continue with: {command}")
    return complete


def _open_data(folder: Path, tokenizer: Tokenizer, config: TransformerConfig) -> Data:
    arrays = open_arrays(folder)
    if config.encoder is not None:
        return TranslationData(**arrays)
    if "pairs" in arrays:
        return LabelData(**arrays) if "labels" in arrays else PairData(**arrays)
    return TokenData(**arrays, masking=None if config.causal else Masking.of(tokenizer))
