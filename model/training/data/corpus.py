"""The texts to train on: files and folders read whole, or a line at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from kvasir.model.platform.suggestions import first_problem

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
    CorpusError for a binary, missing or unreadable path, a folder of JSONL alone, and a corpus
    without text.
    """
    texts: list[str] = []
    seen: set[Path] = set()  # a document read twice would be trained on and held out
    n_skipped = 0
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist")
        files = [path] if path.is_file() else sorted(_walk(path, include, exclude))
        if path.is_dir() and files and all(file.suffix == ".jsonl" for file in files):
            mend = f"to learn chats, pairs or labels, name the files: {path / '*.jsonl'}"
            raise CorpusError(f"{path} has only JSONL, and a folder is read as text; {mend}")
        for file in files:
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
    return Corpus(shuffled(texts, seed), n_skipped)


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
    paths: Sequence[Path], parse: Callable[[Any], T], split: Callable[[str], Any] = json.loads
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


def check_text(text: str) -> str:
    """Return a text of a line. Raises an error of pydantic for one without words."""
    if not text.strip() or "\0" in text:
        raise PydanticCustomError("text", "Input should be text")
    text.encode()  # raises ValueError for half a surrogate pair
    return text


LineText = Annotated[str, AfterValidator(check_text)]


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """Return items in an order that a seed decides."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def draws(seed: int, step: int) -> np.random.Generator:
    """Return the stream of a step: what it draws is a function of (seed, step) alone."""
    key = np.array([seed, step], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


class TextLine(BaseModel, extra="forbid"):
    """A line of JSON whose fields are texts, in the order of training."""

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that its fields may have."""
        fields = cls.model_fields.items()
        return [n for name, f in fields for n in getattr(f.validation_alias, "choices", [name])]

    @classmethod
    def is_meant(cls, line: Any) -> bool:
        """Tell whether a line is meant as one of these, be it right or wrong."""
        meant = isinstance(line, dict) and not line.keys().isdisjoint(cls.names())
        return meant and "messages" not in line

    @classmethod
    def parse(cls, line: Any) -> tuple[str, ...]:
        """Return its texts in the order of the fields. Raises ValueError saying what is wrong."""
        if not cls.is_meant(line):
            needed = (n for n, field in cls.model_fields.items() if field.is_required())
            example = ", ".join(f'"{name}": …' for name in needed)
            kind = cls.model_config["title"]
            raise ValueError(f"not {kind}, {{{example}}}, but {line!r:.200}")
        try:
            texts = cls.model_validate(line)
        except ValidationError as error:
            raise ValueError(first_problem(error, cls.names())) from None
        return tuple(texts.model_dump(exclude_none=True).values())
