"""What an export is measured on: held-out text or pairs, a file's, or English prose."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from kvasir.export.verification.pair_plan import SamplePairs
from kvasir.export.verification.plan import FEWEST_TOKENS, SampleText
from kvasir.export.verification.verify import MAX_PERPLEXITY_LOSS, VerificationError
from kvasir.model.checkpoint import Checkpoint
from kvasir.model.template.chat_template import ChatTemplate
from kvasir.model.tokenizer import leading_ids
from kvasir.model.training.data.conversations import read_conversations
from kvasir.model.training.data.tokens import DATA_FILE, DATA_FOLDER, TokenData, encode, open_arrays
from kvasir.model.training.data.translations import HELD_OUT_FILE, SUFFIXES, read_translations

_PYDOC = f"Python {sys.version_info[0]}.{sys.version_info[1]}'s pydoc topics"
_MOST_PAIRS, _WORDS = 2000, 20  # pairs that are tokenised, and words of an excerpt


def make_sample(
    checkpoint: Checkpoint, file: Path | None, precision: str
) -> SampleText | SamplePairs | None:
    """Return what to verify a model on that makes text: see `sample_text` and `sample_pairs`."""
    make = sample_text if checkpoint.config.encoder is None else sample_pairs
    return make(checkpoint, file, precision)


def sample_text(checkpoint: Checkpoint, file: Path | None, precision: str) -> SampleText | None:
    """Return the text to verify on: the file's, or the run's held-out text, or English prose.

    Prose is for precisions measured on text; without text there is None for others. Raises
    ValueError for a file that is not UTF-8 text, or for too few tokens, and VerificationError for a
    precision that needs text where Python brings none.
    """
    run, prefix = checkpoint.path.parent, tuple(leading_ids(checkpoint.tokenizer))
    text, token_ids = "", np.empty(0, dtype=np.int64)
    if file is not None:
        name, text = file.name, _read(file)
    elif checkpoint.progress and (run / DATA_FOLDER / DATA_FILE).is_file():
        name = f"held-out text of {run.name}"
        token_ids = TokenData(**open_arrays(run / DATA_FOLDER)).held_out.astype(np.int64)
    elif precision in MAX_PERPLEXITY_LOSS:
        name, text = _PYDOC, _prose(precision)
    else:
        return None
    if text:
        token_ids = np.array(checkpoint.tokenizer.encode(text, add_special_tokens=False).ids)
    fewest = FEWEST_TOKENS if precision in MAX_PERPLEXITY_LOSS else 2
    if len(token_ids) < fewest:
        raise ValueError(
            f"{name} has {len(token_ids)} tokens, too few to measure {precision} on; "
            f"give --text FILE with at least {fewest}"
        )
    return SampleText(name, token_ids, prefix)


def sample_pairs(checkpoint: Checkpoint, file: Path | None, precision: str) -> SamplePairs:
    """Return pairs to verify an encoder-decoder on.

    They are those of a TSV or JSONL file, or those that the checkpoint's training held out. Other
    text, or prose, is cut into excerpts, each of which is a source and its target. Raises
    ValueError for a file that is neither text nor translations, or has none, and VerificationError
    where Python brings no prose.
    """
    held_out = checkpoint.path / HELD_OUT_FILE
    if file is None and held_out.is_file():
        name, file = f"held-out text of {checkpoint.path.absolute().parent.name}", held_out
    else:
        name = _PYDOC if file is None else file.name
    are_translations = file is not None and file.suffix in SUFFIXES
    if file is not None and are_translations:
        pairs = list(read_translations([file], seed=0).pairs)[:_MOST_PAIRS]
    else:
        words = (_prose(precision) if file is None else _read(file)).split()[: _MOST_PAIRS * _WORDS]
        starts = range(0, len(words), _WORDS)
        pairs = [(" ".join(words[start : start + _WORDS]),) * 2 for start in starts]
    tokenizer, ends = checkpoint.tokenizer, checkpoint.config.eos_token_ids[:1]
    sources = encode([source for source, _ in pairs], tokenizer, add_special_tokens=True)
    targets = encode([target for _, target in pairs], tokenizer)
    kept = [
        (np.array(source.ids), np.append(target.ids, ends).astype(np.int64))
        for source, target in zip(sources, targets, strict=True)
        if source.ids and target.ids
    ]
    if not kept:
        raise ValueError(f"{name} has no tokens to measure on; give --text FILE")
    return SamplePairs(name, kept, are_translations)


def sample_calibration(checkpoint: Checkpoint, file: Path) -> SampleText:
    """Return the tokens of a text, or of chats in JSONL, to choose how weights are rounded.

    Raises ValueError for a file that is not UTF-8 text, has too few tokens, or is not in what the
    tokenizer knows, and for chats that the checkpoint's template cannot render.
    """
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if config.encoder is not None:
        raise ValueError("an encoder-decoder is calibrated on what it is measured on: give --text")
    are_chats = file.suffix == ".jsonl"
    text = _read_chats(checkpoint, file) if are_chats else _read(file)
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
    if len(token_ids) < FEWEST_TOKENS:
        raise ValueError(
            f"{file.name} has {len(token_ids)} tokens, too few to calibrate on; "
            f"give --calibrate FILE with at least {FEWEST_TOKENS}"
        )
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    n_unknown = 0 if unknown is None else int((token_ids == unknown).sum())
    if 2 * n_unknown > len(token_ids):
        raise ValueError(
            f"the tokenizer does not know {n_unknown} of {len(token_ids)} tokens of {file.name}; "
            "give --calibrate FILE with text in the model's languages"
        )
    prefix = () if are_chats else tuple(leading_ids(tokenizer))  # a template writes its own
    return SampleText(file.name, token_ids, prefix)


def _prose(precision: str) -> str:
    """Return half a million characters on the language. Raises VerificationError for none."""
    try:  # some distributions leave them out
        from pydoc_data.topics import topics  # noqa: PLC0415
    except ImportError:
        raise VerificationError(
            f"{precision} is measured on text, and the checkpoint has none; "
            "give --text FILE, or --precision fp32"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None


def _read_chats(checkpoint: Checkpoint, file: Path) -> str:
    template = ChatTemplate.parse(checkpoint.extra_files)
    if template is None:
        raise ValueError(f"{file.name} holds chats, and the checkpoint no chat template; give text")
    chats = read_conversations([file], template, seed=0)
    return "".join(renderings[-1].text for renderings in chats)
