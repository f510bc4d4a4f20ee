"""A training run on disk: a fresh folder or a resumed one, watched through a progress bar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from tokenizers import Tokenizer

from model.bundle import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE
from model.chat_template import ChatTemplate
from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.config import ConfigError, DecoderConfig
from model.files import sync
from model.network.decoder import Decoder
from model.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer, vocabulary_size
from model.training.conversations import (
    Chats,
    Conversation,
    are_chats,
    pack,
    read_conversations,
    write_chats,
)
from model.training.data import (
    DATA_FOLDER,
    Corpus,
    CorpusError,
    open_tokens,
    read_corpus,
    write_tokens,
)
from model.training.distributed import Processes
from model.training.metrics import METRICS_FILE, plot_losses
from model.training.trainer import Trainer, TrainSettings

PICTURE_FILE = "loss.png"
# All that the preparation of a run writes before its checkpoint of step 0 is in place.
_LEFT_OVER = re.compile(
    rf"{DATA_FOLDER}(\.part)?/(data\.json|(held_out|shard-\d+)\.(bin|mask))|step-0+\.part(-\w+/step-0+)?/[\w.]+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Which text or chats to train on, and how they become tokens. held_out: the share that training never sees.

    tokenizer, chat_template: files to use instead of what is trained, and of the template that the checkpoint to begin
    with brings.
    """

    paths: Sequence[Path]
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    held_out: float = 0.05
    tokenizer: Path | None = None
    chat_template: Path | None = None


class ProgressBar:
    """Loss, tokens per second, model FLOPs utilisation and time left while training, on `bars` if that is a terminal;
    evaluations and samples on `lines`.
    """

    def __init__(self, lines: Console, bars: Console, completed: int, steps: int) -> None:
        self._lines = lines
        self._bar = Progress(
            TextColumn("training", style="bold"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f} · {task.fields[speed]:,.0f} tokens/s ·"),
            TextColumn("MFU {task.fields[mfu]:.1%} ·"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=bars,
            redirect_stdout=lines.is_terminal,  # there lines are printed above the bar
            disable=bars.quiet or not bars.file.isatty(),
        )
        self._task = self._bar.add_task(
            "training", total=steps, completed=completed, loss=0.0, speed=0.0, mfu=0.0
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float, mfu: float) -> None:
        self._bar.update(self._task, completed=step, loss=loss, speed=tokens_per_second, mfu=mfu)

    def evaluated(self, step: int, held_out_loss: float, prompt: str, sample: str) -> None:
        self._lines.print(
            Text.assemble((f"step {step}", "bold"), f"  held-out loss {held_out_loss:.4f}")
        )
        if sample:
            self._lines.print(
                f"{prompt!r} … {sample!r}", style="dim", soft_wrap=not self._lines.is_terminal
            )


def prepare_run(
    folder: Path,
    corpus: CorpusSettings,
    config: DecoderConfig,
    settings: TrainSettings,
    lines: Console,
    init: Checkpoint | None = None,
) -> None:
    """Write what a run starts from: token shards, and a checkpoint of step 0 with tokenizer and weights.

    The weights, tokenizer and extra files are those of `init`, whose positions the context must not exceed; or random,
    and trained: then `config.vocab_size` is the size to train the tokenizer to, and the decoder gets the size it came
    to. What a preparation that was killed has left is replaced. Raises ChatTemplateError, ConfigError, CorpusError or
    TokenizerError before anything is written, and FileExistsError when the folder is in use.
    """
    if folder.exists() and any(folder.iterdir()) and not _is_left_over(folder):
        raise FileExistsError(
            f"{folder} is not empty; continue it with --resume or choose another --out"
        )
    if init is not None and settings.context > config.max_model_len:
        raise ConfigError(
            f"{init.path} has positions for {config.max_model_len} tokens, fewer than a context of {settings.context}; "
            f"use --context {config.max_model_len} or less"
        )
    extra_files = _extra_files(corpus, init)
    documents = _read_documents(corpus, extra_files, settings.seed)
    lines.print(_describe(documents), soft_wrap=True)
    tokenizer = (
        init.tokenizer
        if init is not None
        else _make_tokenizer(corpus, documents, config.vocab_size)
    )
    if init is None:
        end = tokenizer.token_to_id(END_OF_TEXT)
        config = replace(
            config,
            vocab_size=vocabulary_size(tokenizer),
            max_model_len=max(config.max_model_len, settings.context),
            bos_token_id=end,
            eos_token_ids=() if end is None else (end,),
        )
    data_folder, share, context = folder / DATA_FOLDER, corpus.held_out, settings.context
    if isinstance(documents, Corpus):
        end = next(iter(config.eos_token_ids), None)
        data = write_tokens(
            documents, tokenizer, data_folder, held_out=share, context=context, end_id=end
        )
    else:
        chats = pack(documents, tokenizer, held_out=share, context=context)
        lines.print(_describe_packing(chats, context), soft_wrap=True)
        # What ends an answer is to end generation, too.
        endings = dict.fromkeys((*config.eos_token_ids, *sorted(chats.ending_ids)))
        config = replace(config, eos_token_ids=tuple(endings))
        data = write_chats(chats, data_folder)
    torch.manual_seed(settings.seed)
    decoder = Decoder(config)
    if init is not None:
        decoder.load_state_dict(init.decoder.state_dict())
    lines.print(
        f"{data.n_train:,} tokens to train on, {len(data.held_out):,} held out; vocabulary {config.vocab_size:,}; "
        f"{decoder.n_parameters:,} parameters",
        soft_wrap=True,
    )
    sync(*data.folder.iterdir(), data.folder)
    here = Processes(
        0, 1, torch.device("cpu")
    )  # a GPU may not hold the whole of what is to be sharded
    # From here on, whatever ends the run, it can be resumed.
    Trainer(decoder, tokenizer, data, settings, extra_files=extra_files, processes=here).save(
        folder
    )


def _is_left_over(folder: Path) -> bool:
    """Whether a folder holds nothing but what a preparation that was killed leaves."""
    files = [
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    ]
    telling = not files or any(
        file.name == "shard-00000.bin" for file in files
    )  # written first; data.json may be theirs
    return telling and all(_LEFT_OVER.fullmatch(file.as_posix()) for file in files)


def _extra_files(corpus: CorpusSettings, init: Checkpoint | None) -> dict[str, bytes]:
    """What travels along beside the weights; a given chat template replaces the one that was there."""
    files = {} if init is None else dict(init.extra_files)
    if corpus.chat_template is not None:
        files[CHAT_TEMPLATE_FILE] = corpus.chat_template.read_bytes()
        if SPECIAL_TOKENS_FILE not in files:
            names: dict[str, str | None] = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
            if init is not None:
                config = init.decoder.config
                ids = {
                    "bos_token": config.bos_token_id,
                    "eos_token": next(iter(config.eos_token_ids), None),
                }
                names = {
                    name: init.tokenizer.id_to_token(i) for name, i in ids.items() if i is not None
                }
            files[SPECIAL_TOKENS_FILE] = json.dumps(names).encode()
    return files


def _read_documents(
    corpus: CorpusSettings, files: Mapping[str, bytes], seed: int
) -> Corpus | list[Conversation]:
    """Chats where the corpus is JSONL files, else text."""
    if not are_chats(corpus.paths):
        return read_corpus(corpus.paths, corpus.include, corpus.exclude, seed)
    template = ChatTemplate.parse(files)
    if template is None:
        raise CorpusError(
            "chats need a chat template, and there is none; give one with --chat-template FILE, or begin with a "
            "checkpoint that has one: --init DIR"
        )
    return read_conversations(corpus.paths, template, seed)


def _make_tokenizer(
    corpus: CorpusSettings, documents: Corpus | list[Conversation], vocab_size: int
) -> Tokenizer:
    if corpus.tokenizer is not None:
        return load_tokenizer(corpus.tokenizer)
    texts = (
        documents.texts
        if isinstance(documents, Corpus)
        else [part.text for parts in documents for part in parts]
    )
    return train_tokenizer(texts, vocab_size)


def open_run(folder: Path, processes: Processes, *, shard: bool = False) -> Trainer:
    """Continue a run where its newest checkpoint left it, with the settings it was started with.

    Every process reads the folder, and holds the whole decoder in its CPU's memory until it is spread. Raises
    CheckpointError, CorpusError or DistributedError, or PeerError where another of the processes does.
    """
    with processes.together():
        checkpoint = load_checkpoint(folder)
        if not checkpoint.progress:
            raise CheckpointError(
                f"{checkpoint.path} was not written by a training run, so there is nothing to resume"
            )
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
    return CheckpointError(
        f"{checkpoint.path}'s training.json is not whole ({error}); it cannot be resumed"
    )


def train(folder: Path, trainer: Trainer, lines: Console, bars: Console) -> bool:
    """Train to the end or to Ctrl-C (False), then draw the loss curve."""
    with ProgressBar(lines, bars, trainer.step, trainer.settings.steps) as bar:
        complete = trainer.run(folder, bar)
    with trainer.processes.together():  # torchrun ends those that have not left when one has
        if trainer.processes.is_first:
            plot_losses(folder / METRICS_FILE, folder / PICTURE_FILE)
    if not complete:
        message = f"stopped and saved at step {trainer.step}; continue with: kvasir train --resume --out {folder}"
        lines.print(message, soft_wrap=True)
    return complete


def _describe(documents: Corpus | list[Conversation]) -> str:
    if not isinstance(documents, Corpus):
        return f"{len(documents):,} conversations"
    skipped = (
        f" ({documents.n_skipped} files are not text and were passed over)"
        if documents.n_skipped
        else ""
    )
    return f"{len(documents.texts):,} documents, {documents.n_bytes / 1e6:.1f} MB of text{skipped}"


def _describe_packing(chats: Chats, context: int) -> str:
    description = (
        f"{len(chats.ids):,} rows, {chats.learnt.mean():.0%} of their tokens learnt; {chats.n_cut} conversations "
        f"longer than {context} tokens were cut, {chats.n_without_answer} without an answer in them left out"
    )
    if chats.ending_ids:
        return description
    return (
        f"{description}\nno answer ends in a special token of the tokenizer, so generation will not know where to "
        "stop; a chat template can end answers with eos_token"
    )
