"""Pairs of texts in JSONL, and the loss by which an encoder learns to find one by the other.

A line is {"query": …, "document": …} or, as sentence-transformers names them, {"anchor": …,
"positive": …}; either may have a "negative", a text that is like the document and is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AliasChoices, Field
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.training.data.corpus import (
    CorpusError,
    LineText,
    TextLine,
    draws,
    read_lines,
    shuffled,
)
from kvasir.model.training.data.tokens import encode, write_arrays

_SCALE = 20.0  # of cosines: a temperature of 0.05, sentence-transformers' default

Pair = tuple[str, ...]  # a query, its document, and perhaps a negative


class PairLine(TextLine, title="a pair"):
    """A query and its document, by either name, and perhaps a negative."""

    query: LineText = Field(validation_alias=AliasChoices("query", "anchor"))
    document: LineText = Field(validation_alias=AliasChoices("document", "positive"))
    negative: LineText | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Different pairs in the order of training, all with a negative or all without."""

    pairs: Sequence[Pair]

    @property
    def texts(self) -> list[str]:
        """Every text once."""
        return list(dict.fromkeys(text for pair in self.pairs for text in pair))


def read_pairs(paths: Sequence[Path], seed: int) -> Pairs:
    """Read every line of the files once, shuffled by `seed`. Raises CorpusError."""
    pairs = list(dict.fromkeys(read_lines(paths, PairLine.parse)))
    widths = {len(pair) for pair in pairs}
    if len(widths) > 1:
        without = sum(len(pair) == 2 for pair in pairs)
        raise CorpusError(f"{without} of {len(pairs)} pairs lack a negative; give all one, or none")
    return Pairs(shuffled(pairs, seed))


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Pairs of which this process computes the vectors of some.

    texts: [pairs, columns], the number of each text. ids: [own · columns, longest], padded on the
    right; lengths: [own · columns].
    """

    texts: NDArray[np.int64]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def n_targets(self) -> int:
        """Number of pairs that this process computes."""
        return len(self.ids) // int(self.texts.shape[1])


@dataclass(frozen=True, slots=True)
class PairData:
    """Texts on disk as tokens, and pairs of them, of which the last are held out.

    tokens: [n], of all texts, each once. ends: [texts], their ends. pairs: [pairs, columns], the
    numbers of a query, its document and perhaps a negative.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]
    pairs: NDArray[np.int64]
    n_held_out_pairs: int

    @property
    def n_train(self) -> int:
        """Number of tokens to train on."""
        return self._count(self.pairs[: -self.n_held_out_pairs])

    @property
    def n_held_out(self) -> int:
        """Number of tokens that are held out."""
        return self._count(self.pairs[-self.n_held_out_pairs :])

    @property
    def mean_length(self) -> int:
        """The mean number of tokens of a text in the pairs."""
        return round(self._count(self.pairs) / self.pairs.size)

    def batch(
        self, seed: int, step: int, batch_size: int, _: int, rows: range | None = None
    ) -> PairBatch:
        """Draw `batch_size` different pairs, as a function of (seed, step) alone.

        Only the texts of `rows` are read (None: all).
        """
        n_train = len(self.pairs) - self.n_held_out_pairs
        drawn = draws(seed, step).choice(n_train, batch_size, replace=False)
        return self.read(self.pairs[drawn], rows or range(batch_size))

    def read(self, pairs: NDArray[np.int64], rows: range) -> PairBatch:
        """Read the texts of some of these pairs."""
        texts = pairs[rows.start : rows.stop].ravel()
        lengths = self._lengths[texts]
        ids = np.zeros((len(texts), lengths.max()), dtype=np.int64)
        for row, text, length in zip(ids, texts, lengths, strict=True):
            row[:length] = self.tokens[self.ends[text] - length : self.ends[text]]
        return PairBatch(pairs, ids, lengths)

    @property
    def _lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def _count(self, pairs: NDArray[np.int64]) -> int:
        return int(self._lengths[pairs].sum())


@dataclass(frozen=True, slots=True)
class LabelData(PairData):
    """Labelled texts, each as a pair of nothing else.

    labels: [texts], the place of each text's label among those of the model.
    """

    labels: NDArray[np.int64]


def write_pairs(
    corpus: Pairs,
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    context: int,
    progress: Progress = no_progress,
    labels: NDArray[np.int64] | None = None,
) -> tuple[PairData, int]:
    """Tokenise pairs as the server does, write them, and return them and the number of cut texts.

    The last `held_out` share of them is held out, and at least two. labels: of `LabelData`, which
    is then returned. Raises CorpusError for too few pairs, and TokenizerError.
    """
    pairs, kind = corpus.pairs, PairData if labels is None else LabelData
    n_held_out = max(2, int(len(pairs) * held_out))
    if len(pairs) - n_held_out < 2:
        raise CorpusError(f"there are {len(pairs)} different lines; give at least 4")
    texts = {text: i for i, text in enumerate(corpus.texts)}
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(context)
    encodings = list(encode(texts, cutting, add_special_tokens=True, progress=progress))
    for text, encoding in zip(texts, encodings, strict=True):
        if not encoding.ids:
            raise CorpusError(f"the tokenizer has no token for the text {text!r}; leave it out")
    arrays = write_arrays(
        folder,
        tokens=np.concatenate([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]),
        ends=np.cumsum([len(encoding.ids) for encoding in encodings]),
        pairs=np.array([[texts[text] for text in pair] for pair in pairs]),
        n_held_out_pairs=n_held_out,
        **({} if labels is None else {"labels": labels}),
    )
    return kind(**arrays), sum(bool(encoding.overflowing) for encoding in encodings)


def rank_documents(vectors: Tensor, texts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return logits [pairs, pairs · (columns - 1)] and, as targets, each query's document.

    vectors: [pairs, columns, d_out]. Their cross-entropy is InfoNCE (van den Oord et al. 2018) with
    the batch's documents and negatives as candidates (Henderson et al. 2017), which is
    sentence-transformers' MultipleNegativesRankingLoss. A copy of a query's own document is no
    negative.
    """
    unit = functional.normalize(vectors.float(), dim=-1)
    logits = _SCALE * unit[:, 0] @ unit[:, 1:].flatten(0, 1).T
    targets = torch.arange(len(texts), device=logits.device) * (texts.shape[1] - 1)
    same = torch.from_numpy(texts[:, 1, None] == texts[:, 1:].ravel()).to(logits.device)
    same[torch.arange(len(texts)), targets] = False
    return logits.masked_fill(same, -torch.inf), targets
