"""From text files to batches: what is read and refused, and where every token goes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvasir.model.tokenizer import TokenizerError, train_tokenizer
from kvasir.model.training.data import tokens as data
from kvasir.model.training.data.corpus import Corpus, CorpusError, read_corpus
from kvasir.model.training.data.masking import IGNORED
from kvasir.model.training.data.tokens import Batch, TokenData, open_arrays, write_tokens

TEXTS = [f"document {i}: " + "abc " * i for i in range(1, 30)]
tokenizer = train_tokenizer(TEXTS, 300)


def read(
    *paths: Path, include: tuple[str, ...] = ("*",), exclude: tuple[str, ...] = (), seed: int = 0
) -> Corpus:
    return read_corpus(paths, include, exclude, seed)


def write_files(folder: Path, contents: Mapping[str, bytes | str]) -> Path:
    """Write files by their paths relative to a folder."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def encoded(corpus: Corpus) -> list[int]:
    return [token for text in corpus.texts for token in [*tokenizer.encode(text).ids, 0]]


def rows_of(batch: Batch) -> NDArray[np.int64]:
    """[rows, context + 1] of text, where every token is a target: inputs, and the last target."""
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()
    return np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)


def tokens_in(data: TokenData) -> list[int]:
    tokens: list[int] = data.tokens.tolist()
    return tokens


# Reading


def test_files_and_folders_are_read_whole_and_deeply(tmp_path: Path) -> None:
    folder = write_files(
        tmp_path / "f", {"a.txt": "one\r\n", "deep/er/b.py": "twö 🙂", "c": "\ufeffthree"}
    )
    single = write_files(tmp_path, {"d.md": "four"}) / "d.md"
    corpus = read(folder, single)
    assert sorted(corpus.texts) == sorted(["one\r\n", "twö 🙂", "\ufeffthree", "four"])
    assert corpus.summary == "4 documents, 0.0 MB of text"


def test_the_order_is_a_function_of_the_seed_alone(tmp_path: Path) -> None:
    """Folders list their files in no promised order."""
    forwards, backwards = tmp_path / "f", tmp_path / "b"
    for folder, names in ((forwards, range(20)), (backwards, reversed(range(20)))):
        for i in names:
            write_files(folder, {f"{i:02d}": f"text {i}"})
    assert read(forwards, seed=3).texts == read(backwards, seed=3).texts
    assert read(forwards, seed=3).texts != read(forwards, seed=4).texts
    assert sorted(read(forwards, seed=3).texts) == sorted(read(forwards, seed=4).texts)


def test_patterns_choose_files_of_folders_by_relative_path(tmp_path: Path) -> None:
    folder = write_files(
        tmp_path, {"a.py": "a", "sub/b.py": "b", "sub/c.txt": "c", "test/d.py": "d", "e.md": "e"}
    )

    def names(*include: str, exclude: tuple[str, ...] = ()) -> str:
        return "".join(sorted(read(folder, include=include, exclude=exclude).texts))

    assert names("*") == "abcde"
    assert names("*.py") == "abd"
    assert names("*.py", "*.md") == "abde"
    assert names("sub/*") == "bc"
    assert names("*.py", exclude=("test/*",)) == "ab"
    assert names("*", exclude=("*.py", "*.md")) == "c"
    with pytest.raises(CorpusError, match=r"^no text in "):
        names("*.rs")


def test_a_file_named_outright_ignores_the_patterns(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "a", ".hidden": "h"})
    assert read(tmp_path / "a.txt", include=("*.py",), exclude=("*",)).texts == ["a"]
    assert read(tmp_path / ".hidden").texts == ["h"]


def test_a_folder_of_lines_of_json_is_refused(tmp_path: Path) -> None:
    """Its chats would be learned as text, braces and all; files that are named are parsed."""
    folder = write_files(tmp_path, {"f/chats.jsonl": '{"messages": []}\n', "f/deep/b.jsonl": "{}"})
    with pytest.raises(CorpusError, match=re.escape(f"{folder}/f/*.jsonl")):
        read(folder / "f")
    write_files(folder, {"f/a.txt": "a"})
    assert len(read(folder / "f").texts) == 3


def test_hidden_files_and_folders_are_read_only_when_they_are_named(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": "a", ".b": "b", ".git/c": "c", "sub/.d": "d", "sub/.e/f/g": "g"})
    corpus = read(tmp_path)
    assert (corpus.texts, corpus.n_skipped) == (["a"], 0)
    assert read(tmp_path / "sub" / ".e" / "f").texts == ["g"]


@pytest.mark.parametrize(
    "content", [b"a\0b", b"\xff\xfeh\0", "läsa".encode("latin-1"), b"\x80", b"ok \xed\xa0\x80"]
)
def test_what_is_not_utf8_text_is_counted_in_a_folder_and_refused_by_name(
    tmp_path: Path, content: bytes
) -> None:
    write_files(tmp_path, {"good": "good", "bad": content})
    corpus = read(tmp_path)
    assert (corpus.texts, corpus.n_skipped) == (["good"], 1)
    with pytest.raises(CorpusError, match="bad is not UTF-8 text"):
        read(tmp_path / "good", tmp_path / "bad")
    with pytest.raises(CorpusError, match="nowhere does not exist"):
        read(tmp_path / "good", tmp_path / "nowhere")


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    assert read(write_files(tmp_path, {"a": "", "b": " \n\t", "c": "c"})).texts == ["c"]
    (tmp_path / "c").write_bytes(b"\0")
    with pytest.raises(CorpusError, match=r"^no text in .*; left out because .*: 1$"):
        read(tmp_path)


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    """Read twice, a text could be trained on and held out."""
    write_files(tmp_path, {"sub/a": "a", "b": "b"})
    (tmp_path / "link").symlink_to(tmp_path / "b")
    texts = read(tmp_path, tmp_path / "sub", tmp_path / "sub" / "a", tmp_path).texts
    assert sorted(texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("module", "name", "unreadable"), [(Path, "read_bytes", "b"), (os, "scandir", "sub")]
)
def test_an_unreadable_file_or_folder_is_named(
    module: Any, name: str, unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are injected, because root may read anything."""
    write_files(tmp_path, {"a": "a", "b": "b", "sub/c": "c"})
    original = getattr(module, name)

    def refuse(path: Any) -> Any:
        if Path(path).name == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(CorpusError, match=f"/{unreadable} cannot be read: Permission denied"):
        read(tmp_path)


# Writing


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_what_is_written_is_the_encoded_corpus_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: float
) -> None:
    monkeypatch.setattr(data, "_ENCODE_BATCH", 4)
    corpus = Corpus(TEXTS, 0)
    expected = encoded(corpus)
    written = write_tokens(corpus, tokenizer, tmp_path / "data", held_out=held_out, context=5)
    assert tokens_in(written) == expected
    assert len(written.held_out) == max(int(len(expected) * held_out), 6)
    assert written.n_train == len(expected) - len(written.held_out)  # so that no token is in both
    opened = TokenData(**open_arrays(tmp_path / "data"))
    assert isinstance(opened.tokens.base, np.memmap)  # a corpus may be larger than memory
    assert (tokens_in(opened), opened.n_train) == (expected, written.n_train)


def test_a_tokenizer_without_an_end_of_text_token_adds_nothing(tmp_path: Path) -> None:
    plain = Tokenizer(models.WordLevel({"abc": 0, "document": 1, "<unk>": 2}))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    written = write_tokens(Corpus(TEXTS, 0), plain, tmp_path / "data", held_out=0.1, context=5)
    assert tokens_in(written) == [token for text in TEXTS for token in plain.encode(text).ids]


@pytest.mark.parametrize(
    ("form", "leading"), [("<s> $A", [3]), ("$A </s>", []), ("<s> </s> $A </s>", [3, 4])]
)
def test_documents_begin_with_what_the_tokenizer_puts_in_front_of_prompts(
    tmp_path: Path, form: str, leading: list[int]
) -> None:
    """A model trained with a BOS would be tuned on text without, and then served with it."""
    llama = Tokenizer(models.WordLevel({"abc": 0, "document": 1, "<unk>": 2, "<s>": 3, "</s>": 4}))
    llama.pre_tokenizer = pre_tokenizers.Whitespace()
    special_tokens = [("<s>", 3), ("</s>", 4)]
    llama.post_processor = processors.TemplateProcessing(single=form, special_tokens=special_tokens)
    written = write_tokens(
        Corpus(TEXTS, 0), llama, tmp_path / "data", held_out=0.1, context=5, end_id=4
    )
    texts = [llama.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert tokens_in(written) == [token for ids in texts for token in [*leading, *ids, 4]]


def test_a_tokenizer_that_cannot_encode_the_corpus_is_named_in_one_line(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"abc": 0}))
    with pytest.raises(TokenizerError, match=r"^the tokenizer cannot encode the corpus: .*UNK"):
        write_tokens(Corpus(TEXTS, 0), words, tmp_path / "data", held_out=0.1, context=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("largest", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_tokens_are_as_wide_as_the_largest_id_needs(
    tmp_path: Path, largest: int, dtype: type
) -> None:
    """The largest id decides, not the number of tokens."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": largest}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    written = write_tokens(
        Corpus(["a b " * 40], 0), words, tmp_path / "data", held_out=0.2, context=5
    )
    assert tokens_in(written) == [0, largest] * 40
    assert written.held_out.dtype == dtype
    assert rows_of(written.batch(seed=0, step=0, batch_size=2, context=5)).max() == largest


@pytest.mark.parametrize("context", [60, 500])
def test_too_little_text_is_an_error_and_writes_nothing(tmp_path: Path, context: int) -> None:
    corpus = Corpus(["abc " * 25], 0)
    n_tokens = len(encoded(corpus))
    with pytest.raises(
        CorpusError, match=f"^the corpus has {n_tokens} tokens, too few for a context of {context};"
    ):
        write_tokens(corpus, tokenizer, tmp_path / "run" / "data", held_out=0.1, context=context)
    assert list(tmp_path.iterdir()) == []


@given(n_words=st.integers(1, 60), held_out=st.floats(0.0, 0.5), context=st.integers(1, 80))
@settings(max_examples=60)
def test_the_context_that_the_error_advises_is_one_that_works(
    n_words: int, held_out: float, context: int
) -> None:
    corpus = Corpus(["abc " * n_words], 0)
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "data"
        try:
            written = write_tokens(corpus, tokenizer, folder, held_out=held_out, context=context)
        except CorpusError as error:
            advice = str(error).rpartition("at most ")
            assert not advice[1] or int(advice[2]) < context
            if not advice[1]:
                return
            context = int(advice[2])
            written = write_tokens(corpus, tokenizer, folder, held_out=held_out, context=context)
        assert written.batch(0, 0, batch_size=2, context=context).inputs.shape == (2, context)
        assert written.held_out_rows(context, 3).targets.shape[1] == context


def test_opening_a_folder_without_tokens_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds no data\.safetensors; start the training again"):
        open_arrays(tmp_path)


# Batches


def counting(n_train: int, held_out: int = 20) -> TokenData:
    """Tokens that are their own places in the corpus."""
    return TokenData(np.arange(n_train + held_out, dtype=np.uint16), n_train)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    one, other = counting(800), counting(800)

    def batch(data: TokenData, seed: int, step: int) -> list[list[int]]:
        rows: list[list[int]] = rows_of(
            data.batch(seed=seed, step=step, batch_size=8, context=10)
        ).tolist()
        return rows

    wanted = batch(one, 1, 5)
    for step in (0, 9, 5, 6):  # other draws must not matter: a resumed run has not made them
        batch(other, 1, step)
    assert batch(other, 1, 5) == wanted
    assert batch(one, 2, 5) != wanted
    assert batch(one, 1, 6) != wanted
    assert batch(one, 5, 1) != wanted


def test_every_place_is_reached_and_equally_often() -> None:
    """A row is a contiguous stretch of what is trained on."""
    data, n_places = counting(18), 14
    batches = [data.batch(seed=0, step=step, batch_size=50, context=4) for step in range(200)]
    rows = np.concatenate([rows_of(batch) for batch in batches])
    assert (np.diff(rows) == 1).all()
    counts = np.bincount(rows[:, 0], minlength=n_places)
    assert len(counts) == n_places
    expected = len(rows) / n_places
    # Chi-squared with 13 degrees of freedom exceeds this once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 34.5


@pytest.mark.parametrize(
    ("held_out", "n_rows", "expected"),
    [(21, 9, [0, 10]), (20, 9, [0]), (11, 9, [0]), (99, 3, [0, 10, 20])],
)
def test_held_out_rows_overlap_by_the_token_that_is_predicted(
    held_out: int, n_rows: int, expected: list[int]
) -> None:
    """Each held-out token is predicted once, the first one never."""
    data = counting(50, held_out=held_out)
    rows = rows_of(data.held_out_rows(context=10, n_rows=n_rows))
    assert (rows - 50).tolist() == [list(range(start, start + 11)) for start in expected]
    assert rows.dtype == np.int64


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_processes_read_the_parts_of_one_batch(size: int) -> None:
    """Batches drawn apart would train on other text than one process does."""
    data = counting(800)

    def read(rows: range | None) -> NDArray[np.int64]:
        return rows_of(data.batch(seed=3, step=7, batch_size=6, context=10, rows=rows))

    parts = [read(range(first, first + 6 // size)) for first in range(0, 6, 6 // size)]
    assert np.concatenate(parts).tolist() == read(None).tolist()


@pytest.mark.parametrize(("n_rows", "size"), [(5, 1), (5, 2), (5, 3), (1, 4), (6, 3)])
def test_shares_of_a_batch_are_even_and_hold_each_target_once(n_rows: int, size: int) -> None:
    """With uneven shares one process would wait for another in a sharded evaluation."""
    batch = counting(50, held_out=99).held_out_rows(context=10, n_rows=n_rows)
    shares = [batch.share(rank, size) for rank in range(size)]
    assert len({share.inputs.shape for share in shares}) == 1
    assert sum(share.n_targets for share in shares) == batch.n_targets == 10 * n_rows
    learned = np.concatenate([share.targets[share.targets != IGNORED] for share in shares])
    assert sorted(learned) == sorted(batch.targets.flatten())
