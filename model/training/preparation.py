"""The preparation of a training run: its text as tokens, its tokenizer, and its first checkpoint.

The configuration and the corpus say what is learned: a decoder predicts the next token of text or
chats, an encoder masked tokens of text; whatever has a pooling is trained on pairs, an
encoder-decoder on sources and their targets, and any other model on the labels of texts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from kvasir.model.checkpoint import Checkpoint
from kvasir.model.config import Pooling, TransformerConfig
from kvasir.model.configuration.fields import ConfigError
from kvasir.model.directory import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE
from kvasir.model.network.transformer import Transformer
from kvasir.model.platform.files import new_directory
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.tokenizer import (
    END_OF_TEXT,
    SAMPLE_CHARS,
    TokenizerKind,
    load_tokenizer,
    trailing_ids,
    train_tokenizer,
    vocabulary_size,
)
from kvasir.model.training.adapter import NewAdapter
from kvasir.model.training.compilation import is_worth
from kvasir.model.training.data.conversations import pack
from kvasir.model.training.data.corpus import Corpus, CorpusError
from kvasir.model.training.data.documents import CorpusSettings, Documents, read_documents
from kvasir.model.training.data.labels import LabelledTexts, with_labels
from kvasir.model.training.data.masking import Masking
from kvasir.model.training.data.openings import example_prompts
from kvasir.model.training.data.pairs import Pairs, write_pairs
from kvasir.model.training.data.tokens import DATA_FOLDER, TokenData, write_tokens
from kvasir.model.training.data.translations import Translations, held_out_file, write_translations
from kvasir.model.training.distributed import Processes
from kvasir.model.training.objectives import Data
from kvasir.model.training.settings import PASSES, TrainSettings
from kvasir.model.training.trainer import Trainer

# Folders that a preparation leaves behind when it is killed.
_LEFTOVER = re.compile(rf"{DATA_FOLDER}\.part(-\w+)?|step-0+\.part(-\w+)?")
_EVALUATED = 512  # pairs, texts or translations, at most
_TUNING_PASSES = 4  # through labelled texts, with which Devlin et al. 2019 tune BERT


def prepare_run(
    folder: Path,
    corpus: CorpusSettings,
    config: TransformerConfig,
    settings: TrainSettings,
    lines: Console,
    init: Checkpoint | None = None,
    progress: Progress = no_progress,
    adapter: NewAdapter | None = None,
) -> None:
    """Write tokens, and a checkpoint of step 0 with tokenizer and weights.

    With `init`, weights, tokenizer and extra files are its own; an `adapter` of it, if given, is
    all that is trained and written. Without, weights are random, and a tokenizer is trained to
    `config.vocab_size`, which becomes the size it reaches. The remains of a preparation that was
    killed are removed. Raises ChatTemplateError, ConfigError, CorpusError, TokenizerError or, when
    the folder is in use, FileExistsError, and leaves no files.
    """
    leftovers = _find_leftovers(folder)
    extra_files = _extra_files(corpus, init)
    tell = partial(lines.print, soft_wrap=True)
    documents = read_documents(corpus, extra_files, settings.seed, config)
    if isinstance(documents, LabelledTexts):
        if adapter is not None:
            raise ConfigError("--lora leaves the scores of labels as they are; leave it out")
        config = with_labels(config, documents.labels)
    elif not config.causal and config.pooling is None:
        tell("note: a text's vector is the mean of its tokens', of length 1, without --set pooling")
        config = replace(config, pooling=Pooling(kind="mean", normalize=True))
    _check_objective(config, documents, settings.context, init)
    if init is not None:
        tokenizer = init.tokenizer
    else:
        tokenizer, config = _new_tokenizer(
            corpus.tokenizer, documents, config, settings.context, tell, progress
        )
    if isinstance(documents, Pairs | Translations):
        settings = replace(settings, evaluate_rows=_EVALUATED)
    for leftover in leftovers:
        shutil.rmtree(leftover)
    with new_directory(folder / DATA_FOLDER) as part:
        tokens, config = _write_data(
            part, documents, tokenizer, config, corpus.held_out, settings, tell, progress
        )
        extra_files |= held_out_file(part) | example_prompts(tokens, tokenizer)
        torch.manual_seed(settings.seed)
        decoder = Transformer(config)
        if init is not None:
            decoder.load_state_dict(_initial_weights(init, decoder))
        base = None if adapter is None else adapter.join(decoder, extra_files)
        tell(
            f"{tokens.n_train:,} tokens to train on, {tokens.n_held_out:,} held out; "
            f"vocabulary {config.vocab_size:,}; {decoder.n_parameters:,} parameters"
            + ("" if adapter is None else f", of which {adapter.n_parameters:,} are trained")
        )
        on_cpu = Processes(0, 1, torch.device("cpu"))  # a GPU may not hold a decoder to be sharded
        trainer = Trainer(decoder, tokenizer, tokens, settings, extra_files, on_cpu, base=base)
        size, flops = trainer.step_size
        is_tuned = init is not None and isinstance(documents, LabelledTexts)
        passes = _TUNING_PASSES if is_tuned else PASSES
        made = settings.completed(size, tokens.n_train, decoder.n_parameters, passes)
        worth = isinstance(tokens, TokenData) and is_worth(decoder, made.steps * flops)
        made = replace(made, compile=settings.compile and worth)
        if made.steps != settings.steps:
            times = f"{made.steps * size / tokens.n_train:.1f} times through the text"
            tell(f"{made.steps:,} steps of {size:,} tokens, {times}; --steps sets another number")
        trainer.settings = made
        trainer.save(folder)


def _find_leftovers(folder: Path) -> list[Path]:
    """Return the remains of preparations. Raises FileExistsError if there is anything else."""
    held = list(folder.iterdir()) if folder.exists() else []
    if not all(_LEFTOVER.fullmatch(path.name) for path in held):
        mend = "continue it with --resume or choose another --out"
        raise FileExistsError(f"{folder} is not empty; {mend}")
    return held


def _check_objective(
    config: TransformerConfig, documents: Documents, context: int, init: Checkpoint | None
) -> None:
    """Raise ConfigError for a model that is not trained on such documents, or not so long ones."""
    longest = min(side.max_model_len for side in (config, config.encoder) if side is not None)
    if init is not None and context > longest:
        raise ConfigError(
            f"{init.path} has positions for {longest} tokens, fewer than a context of "
            f"{context}; use --context {longest} or less"
        )
    pooling, in_pairs = config.pooling, isinstance(documents, Pairs)
    if pooling is None:
        if in_pairs:
            mend = 'use --preset tiny-encoder, or --set pooling=\'{"kind": "last"}\''
            raise ConfigError(f"pairs are for a model that makes vectors; {mend}")
        return
    if isinstance(documents, LabelledTexts):
        return
    if pooling.labels:
        mend = "train it on lines of a text and its label, or begin with an embedding model"
        raise ConfigError(f"a classifier or reranker learns no vectors; {mend}")
    if config.causal and not in_pairs:
        raise ConfigError("a decoder that makes vectors is trained on pairs, not on text")
    if init is not None:
        own = () if init.config.pooling is None else init.config.pooling.projections
        if pooling.projections != own:
            raise ConfigError(f"pooling.projections must be those of {init.path}")


def _initial_weights(init: Checkpoint, decoder: Transformer) -> dict[str, Tensor]:
    """Return a checkpoint's weights; new labels get those of `decoder`, and no head is left."""
    weights, pooling = init.decoder.state_dict(), decoder.config.pooling
    if pooling is None or not pooling.labels:
        return weights
    before = init.config.pooling
    if before and pooling == replace(before, label_activation=pooling.label_activation):
        return weights
    last = f"pooler.projections.{len(pooling.projections) - 1}."
    kept = {name: w for name, w in weights.items() if not name.startswith(("head.", last))}
    return kept | {name: w for name, w in decoder.state_dict().items() if name.startswith(last)}


def _new_tokenizer(
    given: Path | None,
    documents: Documents,
    config: TransformerConfig,
    context: int,
    tell: Callable[[str], None],
    progress: Progress,
) -> tuple[Tokenizer, TransformerConfig]:
    """Return the given tokenizer, or one trained on the documents, and the configuration for it."""
    if given:
        tokenizer = load_tokenizer(given)
    else:
        if isinstance(documents, list):
            texts = [part.text for parts in documents for part in parts]
        else:
            texts = documents.texts
        kind: TokenizerKind = "decoder" if config.pooling is None else "encoder"
        kind = kind if config.encoder is None else "encoder-decoder"
        if (n_chars := sum(map(len, texts))) > SAMPLE_CHARS:
            sample = f"{SAMPLE_CHARS / 1e6:.0f} million of {n_chars / 1e6:.0f} million characters"
            tell(f"the tokenizer is trained on {sample}, taken evenly")
        tokenizer = train_tokenizer(texts, config.vocab_size, kind, progress)
    end = tokenizer.token_to_id(END_OF_TEXT)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary_size(tokenizer),
        "max_model_len": max(config.max_model_len, context),
    }
    if config.encoder is not None:
        end = next(reversed(trailing_ids(tokenizer)), end)  # what ends a source ends a target
        if end is None:
            raise ConfigError(f"an encoder-decoder's tokenizer needs the token {END_OF_TEXT}")
        sizes |= {"encoder": replace(config.encoder, **sizes), "target_prefix": (end,)}
    ends = () if end is None else (end,)
    return tokenizer, replace(config, **sizes, bos_token_id=end, eos_token_ids=ends)


def _write_data(
    folder: Path,
    documents: Documents,
    tokenizer: Tokenizer,
    config: TransformerConfig,
    share: float,
    settings: TrainSettings,
    tell: Callable[[str], None],
    progress: Progress,
) -> tuple[Data, TransformerConfig]:
    """Write documents as tokens; return these, and the configuration with what ends an answer."""
    context = settings.context
    if isinstance(documents, Pairs):
        labels = None
        if isinstance(documents, LabelledTexts) and config.pooling is not None:
            labels = np.array([config.pooling.labels.index(label) for label in documents.labels])
        pairs, n_cut = write_pairs(documents, tokenizer, folder, share, context, progress, labels)
        n_train = len(pairs.pairs) - pairs.n_held_out_pairs
        kind = "pairs" if labels is None else "texts"
        tell(f"{n_train:,} {kind}, and {pairs.n_held_out_pairs:,} held out; {n_cut} texts were cut")
        if n_train < settings.batch_size:
            wrong = f"a batch of {settings.batch_size} is more than {n_train} {kind} to train on"
            raise CorpusError(f"{wrong}; use a smaller --batch-size")
        return pairs, config
    if isinstance(documents, Translations):
        written = write_translations(
            documents, tokenizer, config, folder, share, context, settings.batch_size, progress
        )
        tell(written.summary(len(documents.pairs)))
        return written, config
    if isinstance(documents, Corpus):
        tell(documents.summary)
        masking, ends = None, list(config.eos_token_ids)
        if config.pooling is not None:
            masking, ends = Masking.of(tokenizer), trailing_ids(tokenizer)
            if context <= (n_around := len(masking.leading) + len(ends)):
                raise ConfigError(f"--context must be more than {n_around}, not {context}")
        end = next(iter(ends), None)
        tokens = write_tokens(documents, tokenizer, folder, share, context, end, progress)
        return replace(tokens, masking=masking), config
    tell(f"{len(documents):,} conversations")
    chats = pack(documents, tokenizer, share, context, progress)
    tell(chats.summary)
    # The tokens that end an answer have to end generation, too.
    endings = dict.fromkeys((*config.eos_token_ids, *sorted(chats.ending_ids)))
    return chats.write(folder, tokenizer), replace(config, eos_token_ids=tuple(endings))


def _extra_files(corpus: CorpusSettings, init: Checkpoint | None) -> dict[str, bytes]:
    """Return the files beside the weights; a given chat template replaces the checkpoint's."""
    files = {} if init is None else dict(init.extra_files)
    if corpus.chat_template is not None:
        files[CHAT_TEMPLATE_FILE] = corpus.chat_template.read_bytes()
        names: dict[str, str | None] = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        if init is not None:
            bos, *ends = init.config.bos_token_id, *init.config.eos_token_ids
            ids = {"bos_token": bos, "eos_token": next(iter(ends), None)}
            names = {
                name: init.tokenizer.id_to_token(i) for name, i in ids.items() if i is not None
            }
        files.setdefault(SPECIAL_TOKENS_FILE, json.dumps(names).encode())
    return files
