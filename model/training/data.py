"""From text files to batches: find and read the corpus, cut it into token shards on disk, draw batches from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from model.tokenizer import END_OF_TEXT, TokenizerError, leading_ids, vocabulary_size

DATA_FOLDER = "data"  # of a training run, where its token shards are
IGNORED = -100  # a target that is not learnt, as cross-entropy has it
SHARD_TOKENS = 2**26
_ENCODE_BATCH = 256  # documents tokenised at once


class CorpusError(ValueError):
    """A corpus that cannot be trained on; the message names the file or folder and the mend."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in memory, in the order of training, and how many files were passed over as not being text."""

    texts: list[str]
    n_skipped: int

    @property
    def n_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


def read_corpus(
    paths: Sequence[Path], include: Sequence[str], exclude: Sequence[str], seed: int
) -> Corpus:
    """Read files, and folders recursively, as UTF-8 text, shuffled by `seed`.

    include and exclude are shell patterns on paths relative to the folder (a file named outright is always taken); a
    file that is reached twice is read once. A binary file inside a folder is passed over and counted; one that is named
    outright raises CorpusError, as do a path that is missing or unreadable and a corpus without any text.
    """
    texts: list[str] = []
    seen: set[Path] = set()  # a document that came twice would be trained on and held out
    n_skipped = 0
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist")
        named = path.is_file()
        for file in [path] if named else sorted(_walk(path, include, exclude)):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            text = _read_text(file)
            if text is None and named:
                raise CorpusError(f"{file} is not UTF-8 text; convert it, or leave it out")
            if text is None:
                n_skipped += 1
            elif text.strip():
                texts.append(text)
    if not texts:
        skipped = f"; passed over as not being UTF-8 text: {n_skipped}" if n_skipped else ""
        raise CorpusError(f"no text in {', '.join(map(str, paths))}{skipped}")
    order = np.random.default_rng(seed).permutation(len(texts))
    return Corpus([texts[i] for i in order], n_skipped)


def _walk(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    """The wanted files below a folder; hidden ones, and what lies in hidden folders, are not."""
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(parent, name) for name in files if not name.startswith(".")):
            name = file.relative_to(folder).as_posix()
            wanted = any(fnmatch(name, pattern) for pattern in include) and not any(
                fnmatch(name, p) for p in exclude
            )
            if wanted and file.is_file():
                yield file


def _refuse(error: OSError) -> NoReturn:
    raise CorpusError(f"{error.filename} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str | None:
    """The file's text; None when it is not UTF-8 text. Raises CorpusError when it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        _refuse(error)
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


class Batch(NamedTuple):
    """inputs: token ids [rows, context]. targets: the token that follows each, or IGNORED where none is learnt."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]

    @property
    def n_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    def share(self, rank: int, size: int) -> Batch:
        """Every size-th row from rank on; as many for each rank, the last ones made up with rows without targets."""
        missing = -len(self.inputs) % size
        inputs = np.pad(self.inputs, ((0, missing), (0, 0)))
        targets = np.pad(self.targets, ((0, missing), (0, 0)), constant_values=IGNORED)
        return Batch(inputs[rank::size], targets[rank::size])

    def split(self, n_rows: int) -> Iterator[Batch]:
        """Parts of at most n_rows."""
        for start in range(0, len(self.inputs), n_rows):
            yield Batch(self.inputs[start : start + n_rows], self.targets[start : start + n_rows])


@dataclass(frozen=True, slots=True)
class TokenData:
    """Token ids on disk: shards to train on, and the end of the corpus, which training never sees.

    Text may be cut anywhere. Chats come in rows of `row` tokens (None: text), context + 1 of the run, beside a bit for
    each token in `masks`, uint8 [rows, ⌈row / 8⌉] a shard: whether it is learnt.
    """

    folder: Path
    shards: list[NDArray[np.unsignedinteger]]
    held_out: NDArray[np.unsignedinteger]
    row: int | None = None
    masks: list[NDArray[np.uint8]] = field(default_factory=list)
    held_out_mask: NDArray[np.uint8] | None = None

    @property
    def n_train(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def prompt_length(self) -> int | None:
        """How many held-out tokens come before the first that is learnt; None: of text, any number is a prompt."""
        return (
            None
            if self.held_out_mask is None
            else int(np.unpackbits(self.held_out_mask[0]).argmax())
        )

    def batch(
        self, *, seed: int, step: int, batch_size: int, context: int, rows: range | None = None
    ) -> Batch:
        """`batch_size` rows of random places, a function of (seed, step) alone: resuming needs no state. Only `rows` of
        them are read (None: all).

        Shards are drawn by their number of possible places, so every place is equally likely.
        """
        generator = np.random.Generator(
            np.random.Philox(key=np.array([seed, step], dtype=np.uint64))
        )
        stride = self.row or 1
        places = np.cumsum(
            [max(0, (len(shard) - context - 1) // stride + 1) for shard in self.shards]
        )
        drawn = generator.integers(places[-1], size=batch_size)
        chosen = []
        for place in drawn if rows is None else drawn[rows.start : rows.stop]:
            shard = int(np.searchsorted(places, place, side="right"))
            index = int(place) - (int(places[shard - 1]) if shard else 0)
            mask = self.masks[shard] if self.masks else None
            chosen.append(self._row(self.shards[shard], mask, index * stride, context))
        return _stack(chosen)

    def held_out_rows(self, context: int, n_rows: int) -> Batch:
        """The first `n_rows` rows of held-out text, which overlap by one token; or of chats, which do not."""
        stride = self.row or context
        n_rows = min(n_rows, (len(self.held_out) - context - 1) // stride + 1)
        return _stack(
            [
                self._row(self.held_out, self.held_out_mask, i * stride, context)
                for i in range(n_rows)
            ]
        )

    def _row(
        self,
        tokens: NDArray[np.unsignedinteger],
        mask: NDArray[np.uint8] | None,
        start: int,
        context: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        row = tokens[start : start + context + 1].astype(np.int64)
        targets = row[1:]
        if mask is not None and self.row is not None:
            learnt = np.unpackbits(mask[start // self.row], count=self.row).astype(bool)
            targets = np.where(learnt[1:], targets, IGNORED)
        return row[:-1], targets


def _stack(rows: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Batch:
    return Batch(
        np.stack([inputs for inputs, _ in rows]), np.stack([targets for _, targets in rows])
    )


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    held_out: float,
    context: int,
    end_id: int | None = None,
) -> TokenData:
    """Tokenise the corpus into `folder`: shard-00000.bin …, held_out.bin (the last share of it) and data.json.

    Every document begins with the special tokens that the tokenizer puts in front of text, as prompts do, and is
    followed by the end-of-text token, or by `end_id` where the tokenizer has none. Raises CorpusError when the training
    or the held-out part is shorter than one context, and TokenizerError when the tokenizer does not take the text,
    before anything is written.
    """
    dtype = token_type(tokenizer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    ending = [token_id for token_id in (end, end_id) if token_id is not None][:1]
    beginning = leading_ids(tokenizer)
    documents = [
        np.array([*beginning, *text.ids, *ending], dtype=dtype)
        for text in encode(corpus.texts, tokenizer)
    ]
    tokens = np.concatenate(documents)
    n_held_out = max(int(len(tokens) * held_out), context + 1)
    n_train = len(tokens) - n_held_out
    if n_train <= context:
        mend = (
            f"add text, or use a context of at most {len(tokens) // 2 - 1}"
            if len(tokens) >= 4
            else "add text"
        )
        raise CorpusError(
            f"the corpus has {len(tokens)} tokens, too few for a context of {context}; {mend}"
        )
    shards = {
        f"shard-{i:05d}.bin": tokens[start : min(start + SHARD_TOKENS, n_train)]
        for i, start in enumerate(range(0, n_train, SHARD_TOKENS))
    }
    return write_shards(
        folder, {**shards, "held_out.bin": tokens[n_train:]}, {"dtype": np.dtype(dtype).name}
    )


def token_type(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """The narrowest type that holds every token id."""
    return np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32


def write_shards(
    folder: Path, files: Mapping[str, NDArray[np.unsignedinteger]], description: dict[str, Any]
) -> TokenData:
    """Write arrays by file name, and data.json, which `open_tokens` needs to read them: all of it or nothing, in place
    of what is there.
    """
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for name, array in files.items():
            (part / name).write_bytes(
                np.ascontiguousarray(array).data
            )  # tofile loses the last of it on a full disk
        (part / "data.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_tokens(folder)


def open_tokens(folder: Path) -> TokenData:
    """Map what `write_shards` wrote. Raises CorpusError when it is not there."""
    path = folder / "data.json"
    if not path.is_file():
        raise CorpusError(
            f"{folder} holds no token shards; start the training again without --resume"
        )
    description = json.loads(path.read_text(encoding="utf-8"))
    dtype, row = np.dtype(description["dtype"]), description.get("row")

    def map_tokens(file: Path) -> NDArray[np.unsignedinteger]:
        return np.memmap(file, dtype=dtype, mode="r")

    def map_mask(file: Path) -> NDArray[np.uint8]:
        return np.memmap(file, dtype=np.uint8, mode="r").reshape(-1, (row + 7) // 8)

    shards = [map_tokens(file) for file in sorted(folder.glob("shard-*.bin"))]
    held_out = map_tokens(folder / "held_out.bin")
    if row is None:
        return TokenData(folder, shards, held_out)
    masks = [map_mask(file) for file in sorted(folder.glob("shard-*.mask"))]
    return TokenData(folder, shards, held_out, row, masks, map_mask(folder / "held_out.mask"))


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoding]:
    """Tokenise text as it stands. Raises TokenizerError."""
    for batch in _batched(texts, _ENCODE_BATCH):
        try:
            yield from tokenizer.encode_batch(batch, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"the tokenizer cannot encode the corpus: {error}") from None


def _batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(islice(left, size)):
        yield batch
