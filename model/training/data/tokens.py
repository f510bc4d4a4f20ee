"""Texts as tokens on disk, and batches of them.

The folder of a run keeps what it trains on in one safetensors file, whose arrays are the fields of
the class that reads it: `TokenData`, `PairData`, `LabelData` or `TranslationData`. They are mapped,
not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Encoding, Tokenizer

from kvasir.model.platform.progress import Progress, interruptible, no_progress
from kvasir.model.tokenizer import (
    END_OF_TEXT,
    TokenizerError,
    cut_at_lines,
    leading_ids,
    reads_lines_alone,
    vocabulary_size,
)
from kvasir.model.training.data.corpus import Corpus, CorpusError, draws
from kvasir.model.training.data.masking import IGNORED, Masking

DATA_FOLDER = "data"  # in the folder of a run
DATA_FILE = "data.safetensors"
_DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64}
_ENCODE_BATCH = 64  # texts tokenised at once


def write_arrays(folder: Path, **arrays: NDArray[Any] | int) -> dict[str, Any]:
    """Write arrays and numbers to an empty or new folder, and return them as `open_arrays` does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.asarray(array) for name, array in arrays.items()}, folder / DATA_FILE)
    return open_arrays(folder)


def open_arrays(folder: Path) -> dict[str, Any]:
    """Map what `write_arrays` wrote. Raises CorpusError when it is missing."""
    path = folder / DATA_FILE
    if not path.is_file():
        message = f"{folder} holds no {DATA_FILE}; start the training again without --resume"
        raise CorpusError(message)
    content = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    opened: dict[str, Any] = {}
    for name, entry in json.loads(content[8:start].tobytes()).items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = content[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        opened[name] = array if array.ndim else int(array)
    return opened


class Batch(NamedTuple):
    """Token ids [rows, context] and targets, IGNORED if not learned.

    Targets are the ids that follow, or, where `Masking` changed the inputs, the ids before that.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @property
    def n_targets(self) -> int:
        """Number of tokens that are learned."""
        return int((self.targets != IGNORED).sum())

    def share(self, rank: int, size: int) -> Batch:
        """Return every size-th row from `rank` on, padded to equal shares without targets."""
        padding = ((0, -len(self.inputs) % size), (0, 0))
        inputs = np.pad(self.inputs, padding)
        targets = np.pad(self.targets, padding, constant_values=IGNORED)
        return Batch(inputs[rank::size], targets[rank::size])


@dataclass(frozen=True, slots=True)
class TokenData:
    """Token ids on disk, of which those from `n_train` on are held out.

    tokens: [n] of text, which may be cut anywhere; or of chats [rows, context + 1], with a bit for
    each token that says whether it is learned: `learned`, uint8 [rows, ⌈(context + 1) / 8⌉]. With
    `masking`, batches are an encoder's.
    """

    tokens: NDArray[np.unsignedinteger]
    n_train: int
    learned: NDArray[np.uint8] | None = None
    masking: Masking | None = None

    @property
    def held_out(self) -> NDArray[np.unsignedinteger]:
        """The tokens that are held out, [n_held_out]."""
        return self.tokens.reshape(-1)[self.n_train :]

    @property
    def n_held_out(self) -> int:
        """Number of tokens that are held out."""
        return self.tokens.size - self.n_train

    @property
    def prompt_length(self) -> int | None:
        """Number of held-out tokens before the first that is learned; None for text."""
        if self.learned is None:
            return None
        return int(np.unpackbits(self.learned[self.n_train // self.tokens.shape[1]]).argmax())

    def batch(
        self, seed: int, step: int, batch_size: int, context: int, rows: range | None = None
    ) -> Batch:
        """Draw `batch_size` rows, as a function of (seed, step) alone: resuming needs no state.

        Every place is equally likely. Only `rows` of the batch are read (None: all).
        """
        stride = self._stride(1)
        n_places = (self.n_train - context - 1) // stride + 1
        drawn = draws(seed, step).integers(n_places, size=batch_size)
        wanted = drawn if rows is None else drawn[rows.start : rows.stop]
        first = 0 if rows is None else rows.start
        seeds = [(seed, step, first + i) for i in range(len(wanted))]
        return self._mask(self._read(wanted * stride, context), seeds)

    def held_out_rows(self, context: int, n_rows: int) -> Batch:
        """Return the first `n_rows` held-out rows; those of text overlap by one token."""
        stride = self._stride(context)
        n_rows = min(n_rows, (self.n_held_out - context - 1) // stride + 1)
        starts = self.n_train + stride * np.arange(n_rows)
        return self._mask(self._read(starts, context), [(i,) for i in range(n_rows)])

    def _stride(self, of_text: int) -> int:
        return of_text if self.learned is None else self.tokens.shape[1]

    def _mask(self, batch: Batch, seeds: Sequence[Sequence[int]]) -> Batch:
        """Mask each row by a seed of its own, so that it depends on no other row."""
        if self.masking is None:
            return batch
        rows = zip(batch.inputs[:, None], seeds, strict=True)
        made = [self.masking.apply(row, np.random.default_rng(seed)) for row, seed in rows]
        inputs, targets = (np.concatenate(part) for part in zip(*made, strict=True))
        return Batch(inputs, targets)

    def _read(self, starts: NDArray[np.int64], context: int) -> Batch:
        """Read the rows that begin at these tokens."""
        tokens = self.tokens.reshape(-1)
        rows = np.stack([tokens[start : start + context + 1] for start in starts])
        inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if self.learned is not None:
            size = self.tokens.shape[1]
            learned = np.unpackbits(self.learned[starts // size], axis=1, count=size)
            targets = np.where(learned[:, 1:], targets, IGNORED)
        return Batch(inputs, targets)


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    context: int,
    end_id: int | None = None,
    progress: Progress = no_progress,
) -> TokenData:
    """Tokenise the corpus and write it to a new `folder`.

    The last `held_out` share of the tokens is held out. Every document begins with the special
    tokens that the tokenizer puts before text, as prompts do, and is followed by the end-of-text
    token, or by `end_id` where the tokenizer has none. Before anything is written, raises
    CorpusError when a part is shorter than one context, and TokenizerError.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    ending = [token_id for token_id in (end, end_id) if token_id is not None][:1]
    beginning = leading_ids(tokenizer)
    cut = cut_at_lines if reads_lines_alone(tokenizer) else lambda text: [text]
    pieces = [cut(text) for text in corpus.texts]
    encodings = encode(list(chain.from_iterable(pieces)), tokenizer, progress=progress)
    rows = []
    for document in pieces:
        ids = chain.from_iterable(encoding.ids for encoding in islice(encodings, len(document)))
        rows.append(np.array([*beginning, *ids, *ending], dtype=np.uint32))
    tokens = np.concatenate(rows)
    n_train = len(tokens) - max(int(len(tokens) * held_out), context + 1)
    if n_train <= context:
        longest, few = len(tokens) // 2 - 1, f"too few for a context of {context}"
        mend = f"add text, or use a context of at most {longest}" if longest >= 1 else "add text"
        raise CorpusError(f"the corpus has {len(tokens)} tokens, {few}; {mend}")
    tokens = tokens.astype(token_type(tokenizer))
    return TokenData(**write_arrays(folder, tokens=tokens, n_train=n_train))


def token_type(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """Return the type that holds all ids of a tokenizer."""
    return np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32


def encode(
    texts: Collection[str],
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = False,
    progress: Progress = no_progress,
) -> Iterator[Encoding]:
    """Tokenise texts. Raises TokenizerError."""
    remaining, what, n_done = iter(texts), "encoding the text", 0
    while batch := list(islice(remaining, _ENCODE_BATCH)):
        progress(what, n_done, len(texts))
        encode_batch = partial(tokenizer.encode_batch, batch)
        try:
            yield from interruptible(lambda _: encode_batch(add_special_tokens=add_special_tokens))  # noqa: B023
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"the tokenizer cannot encode the corpus: {error}") from None
        n_done += len(batch)
