"""The way from text files through token shards on disk to batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from kvasir.model.progress import Progress, interruptible, unheard
from kvasir.model.tokenizer import (
    END_OF_TEXT,
    TokenizerError,
    cut_at_lines,
    leading_ids,
    reads_lines_alone,
    vocabulary_size,
)
from kvasir.model.training.masking import IGNORED, Masking

DATA_FOLDER = "data"  # token shards in the folder of a run
SHARD_TOKENS = 2**26
_ENCODE_BATCH = 64  # texts tokenised at once
T = TypeVar("T")


class CorpusError(ValueError):
    """A corpus that cannot be trained on; the message names the file or folder and the fix."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in the order of training."""

    texts: list[str]
    n_skipped: int  # files left out because they are not text

    @property
    def summary(self) -> str:
        """The size of the corpus in words."""
        megabytes = sum(len(text.encode()) for text in self.texts) / 1e6
        text = f"{len(self.texts):,} documents, {megabytes:.1f} MB of text"
        skipped = f" ({self.n_skipped} files are not text and were left out)"
        return text + skipped if self.n_skipped else text


def read_corpus(
    paths: Sequence[Path], include: Sequence[str], exclude: Sequence[str], seed: int
) -> Corpus:
    """Read files, and folders recursively, as UTF-8 text, shuffled by `seed`.

    include and exclude are shell patterns on paths relative to a folder; a file among `paths` is
    always read, and no file twice. A binary file inside a folder is left out and counted. Raises
    CorpusError for a binary, missing or unreadable path, and for a corpus without text.
    """
    texts: list[str] = []
    seen: set[Path] = set()  # a document read twice would be trained on and held out
    n_skipped = 0
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist")
        for file in [path] if path.is_file() else sorted(_walk(path, include, exclude)):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            text = _read_text(file)
            if text is None and file is path:
                raise CorpusError(f"{file} is not UTF-8 text; convert it, or leave it out")
            if text is None:
                n_skipped += 1
            elif text.strip():
                texts.append(text)
    if not texts:
        skipped = f"; left out because they are not UTF-8 text: {n_skipped}" if n_skipped else ""
        raise CorpusError(f"no text in {', '.join(map(str, paths))}{skipped}")
    order = np.random.default_rng(seed).permutation(len(texts))
    return Corpus([texts[i] for i in order], n_skipped)


def _walk(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """Yield the wanted files below a folder, without hidden files and folders."""
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(parent, name) for name in files if not name.startswith(".")):
            name = file.relative_to(folder).as_posix()
            included = any(fnmatch(name, pattern) for pattern in include)
            excluded = any(fnmatch(name, pattern) for pattern in exclude)
            if included and not excluded and file.is_file():
                yield file


def _refuse(error: OSError) -> NoReturn:
    raise CorpusError(f"{error.filename} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str | None:
    """Return the file's text, or None when it is not UTF-8 text. Raises CorpusError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        _refuse(error)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def read_lines(
    paths: Sequence[Path],
    parse: Callable[[Any], T],
    split: Callable[[str], Any] = json.loads,
) -> list[T]:
    """Parse every line of JSONL files, or of what `split` reads, without the blank ones.

    Raises CorpusError naming a line for which either raises ValueError.
    """
    parsed = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            try:
                parsed += [parse(split(line))] if line.strip() else []
            except json.JSONDecodeError as error:
                raise CorpusError(f"{path}:{number}: not JSON: {error}") from None
            except ValueError as error:
                raise CorpusError(f"{path}:{number}: {error}") from None
    if not parsed:
        raise CorpusError(f"no lines in {', '.join(map(str, paths))}")
    return parsed


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
    """Token ids on disk: shards to train on, and the end of the corpus, which is held out.

    Text may be cut anywhere. Chats come in rows of `row` tokens, which is the run's context + 1
    (None: text), and with a bit for each token that says whether it is learned: `masks`, uint8
    [rows, ⌈row / 8⌉] for each shard and, last, for what is held out. With `masking`, batches are an
    encoder's.
    """

    shards: list[NDArray[np.unsignedinteger]]
    held_out: NDArray[np.unsignedinteger]
    row: int | None = None
    masks: list[NDArray[np.uint8]] = field(default_factory=list)
    masking: Masking | None = None

    @property
    def n_train(self) -> int:
        """Number of tokens to train on."""
        return sum(len(shard) for shard in self.shards)

    @property
    def n_held_out(self) -> int:
        """Number of tokens that are held out."""
        return len(self.held_out)

    @property
    def prompt_length(self) -> int | None:
        """Number of held-out tokens before the first that is learned; None for text."""
        return int(np.unpackbits(self.masks[-1][0]).argmax()) if self.masks else None

    def batch(
        self, seed: int, step: int, batch_size: int, context: int, rows: range | None = None
    ) -> Batch:
        """Draw `batch_size` rows, as a function of (seed, step) alone: resuming needs no state.

        Every place in the shards is equally likely. Only `rows` of the batch are read (None: all).
        """
        key = np.array([seed, step], dtype=np.uint64)
        stride = self.row or 1
        lengths = np.array([len(shard) for shard in self.shards])
        ends = np.cumsum(np.maximum(0, (lengths - context - 1) // stride + 1))
        drawn = np.random.Generator(np.random.Philox(key=key)).integers(ends[-1], size=batch_size)
        wanted = drawn if rows is None else drawn[rows.start : rows.stop]
        shards = np.searchsorted(ends, wanted, side="right")
        starts = (wanted - np.append(0, ends)[shards]) * stride
        batch = self._read([*zip(shards, starts, strict=True)], context)
        first = 0 if rows is None else rows.start
        return self._mask(batch, [(seed, step, first + i) for i in range(len(wanted))])

    def held_out_rows(self, context: int, n_rows: int) -> Batch:
        """Return the first `n_rows` held-out rows; those of text overlap by one token."""
        stride = self.row or context
        n_rows = min(n_rows, (len(self.held_out) - context - 1) // stride + 1)
        batch = self._read([(len(self.shards), i * stride) for i in range(n_rows)], context)
        return self._mask(batch, [(i,) for i in range(n_rows)])

    def _mask(self, batch: Batch, seeds: Sequence[Sequence[int]]) -> Batch:
        """Mask each row by a seed of its own, so that it depends on no other row."""
        if self.masking is None:
            return batch
        rows = zip(batch.inputs[:, None], seeds, strict=True)
        made = [self.masking.apply(row, np.random.default_rng(seed)) for row, seed in rows]
        inputs, targets = (np.concatenate(part) for part in zip(*made, strict=True))
        return Batch(inputs, targets)

    def _read(self, places: Sequence[tuple[int, int]], context: int) -> Batch:
        """Read the rows that begin at these places: the part's number, and a token in it."""
        parts = [*self.shards, self.held_out]
        rows = np.stack([parts[part][at : at + context + 1] for part, at in places])
        inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if self.row is not None:
            bits = np.stack([self.masks[part][at // self.row] for part, at in places])
            learned = np.unpackbits(bits, axis=1, count=self.row)[:, 1:].astype(bool)
            targets = np.where(learned, targets, IGNORED)
        return Batch(inputs, targets)


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    held_out: float,
    context: int,
    end_id: int | None = None,
    progress: Progress = unheard,
) -> TokenData:
    """Tokenise the corpus and write it to a new `folder`, as `write_shards` does.

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
        ids = chain.from_iterable(one.ids for one in islice(encodings, len(document)))
        rows.append(np.array([*beginning, *ids, *ending], dtype=np.uint32))
    tokens = np.concatenate(rows)
    n_train = len(tokens) - max(int(len(tokens) * held_out), context + 1)
    if n_train <= context:
        longest, few = len(tokens) // 2 - 1, f"too few for a context of {context}"
        mend = f"add text, or use a context of at most {longest}" if longest >= 1 else "add text"
        raise CorpusError(f"the corpus has {len(tokens)} tokens, {few}; {mend}")
    return write_shards(folder, tokens, n_train, vocabulary_size(tokenizer))


def write_shards(
    folder: Path,
    ids: NDArray[np.uint32],
    n_train: int,
    vocab_size: int,
    learned: NDArray[np.bool_] | None = None,
) -> TokenData:
    """Write an empty or new folder: shard-00000.bin …, held_out.bin and data.json.

    ids: token ids [n] of text, of which those from `n_train` on are held out; or rows [n, row] of
    chats, with `learned` of the same shape, which goes into shard-00000.mask …, held_out.mask.
    """
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    description: dict[str, Any] = {"dtype": dtype.name}
    arrays: dict[str, NDArray[Any]] = {"bin": ids.astype(dtype)}
    if learned is not None:
        description["row"] = ids.shape[1]
        arrays["mask"] = np.packbits(learned, axis=1)
    per_shard = max(1, SHARD_TOKENS // ids[0].size)
    ends = [*range(per_shard, n_train, per_shard), n_train]
    names = [*(f"shard-{i:05d}" for i in range(len(ends))), "held_out"]
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, array in arrays.items():
        for name, items in zip(names, np.split(array, ends), strict=True):
            # tofile loses the last bytes on a full disk without an error.
            (folder / f"{name}.{suffix}").write_bytes(np.ascontiguousarray(items).data)
    (folder / "data.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    return open_tokens(folder)


def open_tokens(folder: Path) -> TokenData:
    """Map what `write_shards` wrote. Raises CorpusError when it is missing."""
    path = folder / "data.json"
    if not path.is_file():
        message = f"{folder} holds no token shards; start the training again without --resume"
        raise CorpusError(message)
    description = json.loads(path.read_text(encoding="utf-8"))
    dtype, row = np.dtype(description["dtype"]), description.get("row")
    shards = [np.memmap(file, dtype, mode="r") for file in sorted(folder.glob("shard-*.bin"))]
    held_out = np.memmap(folder / "held_out.bin", dtype, mode="r")
    masks: list[NDArray[np.uint8]] = []
    if row is not None:
        files = [*sorted(folder.glob("shard-*.mask")), folder / "held_out.mask"]
        flat = [np.memmap(file, np.uint8, mode="r") for file in files]
        masks = [mask.reshape(-1, (row + 7) // 8) for mask in flat]
    return TokenData([*shards], held_out, row, masks)


def encode(
    texts: Collection[str],
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = False,
    progress: Progress = unheard,
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
