"""From text files to batches: find and read the corpus, cut it into token shards on disk, draw batches from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model.tokenizer import END_OF_TEXT, TokenizerError, vocabulary_size

DATA_FOLDER = "data"  # of a training run, where its token shards are
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


def read_corpus(paths: Sequence[Path], include: Sequence[str], exclude: Sequence[str], seed: int) -> Corpus:
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
            wanted = any(fnmatch(name, pattern) for pattern in include) and not any(fnmatch(name, p) for p in exclude)
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


@dataclass(frozen=True, slots=True)
class TokenData:
    """Token ids on disk: shards to train on, and the end of the corpus, which training never sees."""

    folder: Path
    shards: list[NDArray[np.unsignedinteger]]
    held_out: NDArray[np.unsignedinteger]

    @property
    def n_train(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def batch(self, *, seed: int, step: int, batch_size: int, context: int) -> NDArray[np.int64]:
        """[batch_size, context + 1] tokens of random places, a function of (seed, step) alone: resuming needs no state.

        Shards are drawn by their number of possible places, so every place is equally likely.
        """
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        places = np.cumsum([max(0, len(shard) - context) for shard in self.shards])
        rows = []
        for place in generator.integers(places[-1], size=batch_size):
            shard = int(np.searchsorted(places, place, side="right"))
            start = int(place) - (int(places[shard - 1]) if shard else 0)
            rows.append(self.shards[shard][start : start + context + 1])
        return np.stack(rows).astype(np.int64)

    def held_out_rows(self, context: int, n_rows: int) -> NDArray[np.int64]:
        """[rows, context + 1]: the first `n_rows` stretches of held-out text that overlap by one token."""
        n_rows = min(n_rows, (len(self.held_out) - 1) // context)
        return np.stack([self.held_out[i * context : (i + 1) * context + 1] for i in range(n_rows)]).astype(np.int64)


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, held_out: float, context: int) -> TokenData:
    """Tokenise the corpus into `folder`: shard-00000.bin …, held_out.bin (the last share of it) and data.json.

    Every document is followed by the end-of-text token, where the tokenizer has one. Raises CorpusError when the
    training or the held-out part is shorter than one context, and TokenizerError when the tokenizer does not take the
    text, before anything is written.
    """
    dtype = np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32
    tokens = np.concatenate([np.array(ids, dtype=dtype) for ids in _encode(corpus.texts, tokenizer)])
    n_held_out = max(int(len(tokens) * held_out), context + 1)
    n_train = len(tokens) - n_held_out
    if n_train <= context:
        mend = f"add text, or use a context of at most {len(tokens) // 2 - 1}" if len(tokens) >= 4 else "add text"
        raise CorpusError(f"the corpus has {len(tokens)} tokens, too few for a context of {context}; {mend}")
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for i, start in enumerate(range(0, n_train, SHARD_TOKENS)):
            tokens[start : min(start + SHARD_TOKENS, n_train)].tofile(part / f"shard-{i:05d}.bin")
        tokens[n_train:].tofile(part / "held_out.bin")
        (part / "data.json").write_text(json.dumps({"dtype": np.dtype(dtype).name}) + "\n", encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_tokens(folder)


def open_tokens(folder: Path) -> TokenData:
    """Map what `write_tokens` wrote. Raises CorpusError when it is not there."""
    description = folder / "data.json"
    if not description.is_file():
        raise CorpusError(f"{folder} holds no token shards; start the training again without --resume")
    dtype = np.dtype(json.loads(description.read_text(encoding="utf-8"))["dtype"])
    shards = [np.memmap(path, dtype=dtype, mode="r") for path in sorted(folder.glob("shard-*.bin"))]
    return TokenData(folder, list(shards), np.memmap(folder / "held_out.bin", dtype=dtype, mode="r"))


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _ENCODE_BATCH:
            yield from _encode_batch(batch, tokenizer, end)
            batch = []
    yield from _encode_batch(batch, tokenizer, end)


def _encode_batch(batch: list[str], tokenizer: Tokenizer, end: int | None) -> Iterator[list[int]]:
    try:
        encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"the tokenizer cannot encode the corpus: {error}") from None
    for encoding in encodings:
        yield encoding.ids if end is None else [*encoding.ids, end]
