"""Translations: sources and their targets in TSV or JSONL, and batches of similar lengths.

A line of TSV is a source, a tab and its target; one of JSONL is {"source": …, "target": …}. They
may be of any languages: the two ways to write a number are a translation too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from tokenizers import Tokenizer

from kvasir.model.config import TransformerConfig
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.training.data.corpus import CorpusError, TextLine, check_text, draws, read_lines
from kvasir.model.training.data.masking import IGNORED
from kvasir.model.training.data.tokens import encode, write_arrays

SUFFIXES = (".jsonl", ".tsv")
HELD_OUT_FILE = "held_out.jsonl"  # in the checkpoint directory, for whoever measures the model
_LISTED = 1000  # translations in HELD_OUT_FILE, at most
_SHARED_STEPS = 64  # whose batches are drawn together

_Translation = tuple[str, ...]  # a source and its target
# More characters than any context holds.
_Side = Annotated[str, Field(max_length=2**20), AfterValidator(check_text)]


class TranslationLine(TextLine, title="a translation"):
    """A source and its target."""

    source: _Side
    target: _Side


_KEYS = tuple(TranslationLine.model_fields)


@dataclass(frozen=True, slots=True)
class Translations:
    """Different pairs of a source and a target in the order of training, those of a source next."""

    pairs: Sequence[_Translation]

    @property
    def texts(self) -> list[str]:
        """All sources and targets."""
        return [text for pair in self.pairs for text in pair]


def read_translations(paths: Sequence[Path], seed: int) -> Translations:
    """Read every line of the files once, the sources shuffled by `seed`. Raises CorpusError."""
    lines = {suffix: [path for path in paths if path.suffix == suffix] for suffix in SUFFIXES}
    for path in paths:
        if path.suffix not in SUFFIXES:
            wanted = " or ".join(f"*{suffix}" for suffix in SUFFIXES)
            raise CorpusError(f"{path} holds no sources and targets, which are read from {wanted}")
    pairs = read_lines(lines[".jsonl"], TranslationLine.parse) if lines[".jsonl"] else []
    if lines[".tsv"]:
        pairs += read_lines(lines[".tsv"], TranslationLine.parse, _split)
    sources = list(dict.fromkeys(source for source, _ in pairs))
    order = np.random.default_rng(seed).permutation(len(sources))
    rank = dict(zip(sources, order, strict=True))
    return Translations(sorted(dict.fromkeys(pairs), key=lambda pair: rank[pair[0]]))


def _split(line: str) -> dict[str, str]:
    columns = line.split("\t")
    if len(columns) != len(_KEYS):
        raise ValueError(
            f"a line is a source, a tab and its target, but there are {len(columns)} columns"
        )
    return dict(zip(_KEYS, columns, strict=True))


class TranslationBatch(NamedTuple):
    """A batch's translations in this process, padded on the right.

    sources: [rows, n_source], of `lengths` [rows]. inputs, targets: [rows, n_target]; a target is
    the token that follows its input, or IGNORED within the prefix and after the end.
    """

    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @property
    def n_targets(self) -> int:
        """Number of tokens that are learned."""
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class TranslationData:
    """Translations on disk as tokens, of which the last are held out.

    tokens: [n], of each source and its target in turn, with the tokens that end them. ends:
    [translations, 2]. prefix: a target begins with it.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]
    n_held_out_pairs: int
    prefix: NDArray[np.int64]

    @property
    def n_train(self) -> int:
        """Number of tokens to train on."""
        return int(self.ends[-self.n_held_out_pairs - 1, 1])

    @property
    def n_held_out(self) -> int:
        """Number of tokens that are held out."""
        return len(self.tokens) - self.n_train

    @property
    def n_train_pairs(self) -> int:
        """Number of translations to train on."""
        return len(self.ends) - self.n_held_out_pairs

    def summary(self, n_read: int) -> str:
        """Count the translations in words; n_read: with those that were too long."""
        n, n_held_out = self.n_train_pairs, self.n_held_out_pairs
        left_out = f"{n_read - n - n_held_out:,} longer than the context left out"
        return f"{n:,} translations, and {n_held_out:,} held out; {left_out}"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each source and target, [translations, 2]."""
        return np.diff(self.ends.ravel(), prepend=0).reshape(-1, 2)

    def batch(
        self, seed: int, step: int, batch_size: int, _: int, rows: range | None = None
    ) -> TranslationBatch:
        """Draw different translations of similar lengths, as a function of (seed, step) alone.

        Those of _SHARED_STEPS steps are drawn at once, sorted by length and cut into as many
        batches, which come in any order. Only `rows` of the batch are read (None: all).
        """
        n_batches = min(_SHARED_STEPS, self.n_train_pairs // batch_size)
        draw, place = divmod(step, n_batches)
        generator = draws(seed, draw)
        drawn = generator.choice(self.n_train_pairs, n_batches * batch_size, replace=False)
        order = np.lexsort(self.lengths[drawn].T[::-1])
        batches = drawn[order].reshape(n_batches, batch_size)
        chosen = batches[generator.permutation(n_batches)[place]]
        return self._read(chosen if rows is None else chosen[rows.start : rows.stop])

    def held_out(self, start: int, stop: int) -> TranslationBatch:
        """Return some of the translations that are held out, counted from the first."""
        return self._read(np.arange(start, stop) + self.n_train_pairs)

    def _read(self, chosen: NDArray[np.int64]) -> TranslationBatch:
        ends, lengths = self.ends[chosen], self.lengths[chosen]
        n_source, n_target = lengths.max(axis=0)
        sources = np.zeros((len(chosen), n_source), dtype=np.int64)
        inputs = np.zeros((len(chosen), len(self.prefix) - 1 + n_target), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        for row, (middle, end) in enumerate(ends):
            of_source, of_target = lengths[row]
            learned = self.tokens[middle:end]
            sources[row, :of_source] = self.tokens[middle - of_source : middle]
            inputs[row, : len(self.prefix) - 1 + of_target] = [*self.prefix, *learned[:-1]]
            targets[row, len(self.prefix) - 1 :][:of_target] = learned
        return TranslationBatch(sources, lengths[:, 0], inputs, targets)


def write_translations(
    corpus: Translations,
    tokenizer: Tokenizer,
    config: TransformerConfig,
    folder: Path,
    held_out: float,
    context: int,
    batch_size: int,
    progress: Progress = no_progress,
) -> TranslationData:
    """Tokenise translations, write those that are not too long, and return them.

    Sources become tokens as in the server; a target is its text's, and the token that ends it.
    Both sides have at most `context` tokens, the target with its prefix. The last `held_out` share
    of them is held out, and at least one; no source of these is trained on. Raises CorpusError for
    too few, or for a text without tokens, and TokenizerError.
    """
    sources, targets = zip(*corpus.pairs, strict=True)
    end = config.eos_token_ids[0]
    rows, kept = list[NDArray[np.uint32]](), list[_Translation]()
    both = zip(
        corpus.pairs,
        encode(sources, tokenizer, add_special_tokens=True, progress=progress),
        encode(targets, tokenizer),
        strict=True,
    )
    for pair, *encodings in both:
        source, target = (encoding.ids for encoding in encodings)
        if not source or not target:
            raise CorpusError(f"the tokenizer has no token for a text in {pair!r:.200}")
        if len(source) <= context and len(config.target_prefix) + len(target) <= context:
            kept.append(pair)
            rows += [np.array(source, np.uint32), np.array([*target, end], np.uint32)]
    n_train = len(kept) - max(1, int(len(kept) * held_out))
    while 0 < n_train < len(kept) and kept[n_train - 1][0] == kept[n_train][0]:
        n_train -= 1
    if n_train < batch_size:
        mend = "use a smaller --batch-size or a larger --context, or add some"
        wrong = f"there are {max(0, n_train)} translations of up to {context} tokens to train on"
        raise CorpusError(f"{wrong}, fewer than a batch of {batch_size}; {mend}")
    arrays = write_arrays(
        folder,
        tokens=np.concatenate(rows),
        ends=np.cumsum([len(row) for row in rows]).reshape(-1, 2),
        n_held_out_pairs=len(kept) - n_train,
        prefix=np.array(config.target_prefix, np.int64),
    )
    listed = (dict(zip(_KEYS, pair, strict=True)) for pair in kept[n_train:][:_LISTED])
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in listed]
    (folder / HELD_OUT_FILE).write_text("".join(lines), encoding="utf-8")
    return TranslationData(**arrays)


def held_out_file(folder: Path) -> dict[str, bytes]:
    """Return the translations that are held out, if it is these, as a file of a checkpoint."""
    path = folder / HELD_OUT_FILE
    return {path.name: path.read_bytes()} if path.is_file() else {}
