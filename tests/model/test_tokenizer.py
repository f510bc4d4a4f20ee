"""Byte-level BPE: every text round-trips; errors in training or loading are one line."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvasir.model import tokenizer_limits
from kvasir.model.importing.gguf import tokenizer as gguf
from kvasir.model.tokenizer import (
    END_OF_TEXT,
    TokenizerError,
    cut_at_lines,
    load_tokenizer,
    longest_token,
    reads_lines_alone,
    train_tokenizer,
    vocabulary_size,
)
from tests.kit.sentence_pieces import sentence_pieces

CORPUS = [
    "the cat sat on the mat. ",
    "def read(path):\n    return path.read_text()\n",
    "räksmörgås 漢字 🙂\n",
]
tokenizer = train_tokenizer(CORPUS * 3, 320)


@given(st.text(max_size=60).filter(lambda text: END_OF_TEXT not in text))
@example("")
@example(" ")
@example("  two  spaces\t\ttabs\r\n\r\nlines\n\n")
@example("👩‍👩‍👧‍👦 🇸🇪 e\u0301 \u200b\ufeff\u2028")
@example("".join(map(chr, range(0x120))))
@example("\x00\x1b[31m\x7f\ufffd\U0010ffff")
@example("<|endoftext| ><|endoftext")
def test_any_text_round_trips(text: str) -> None:
    """Also characters that training never saw: the alphabet holds every byte."""
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= token_id < 320 for token_id in ids)


@given(st.lists(st.text(max_size=20).filter(lambda text: END_OF_TEXT not in text), max_size=4))
def test_texts_with_the_end_of_text_token_between_them_round_trip(texts: list[str]) -> None:
    text = END_OF_TEXT.join(texts)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(0) == max(0, len(texts) - 1)
    assert tokenizer.decode(ids) == "".join(texts)


lines = st.text(alphabet="a \t\n:_.,7é", max_size=30)


@given(lines, st.text(alphabet=" \t", max_size=5), lines)
@example("def f(x):", "    ", "return x\n")
def test_a_prompt_cut_after_an_indentation_starts_as_the_whole_text_does(
    before: str, indent: str, after: str
) -> None:
    """Else the model would continue from tokens that it never saw in training."""
    for prompt, rest in ((f"{before}\n{indent}", f"x{after}"), (f"{before}\n", after)):
        ids = tokenizer.encode(prompt).ids
        assert tokenizer.encode(prompt + rest).ids[: len(ids)] == ids


def test_frequent_words_become_one_token() -> None:
    """A tokenizer without merges round-trips too, but makes sequences several times longer."""
    assert len(tokenizer.encode("the the the").ids) == 3


@given(st.lists(lines, max_size=6))
@example(["a\n", " b", "  c\n\n"])
def test_a_text_cut_at_lines_has_the_tokens_of_the_whole(parts: list[str]) -> None:
    text = "\n".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvasir.model.tokenizer._PIECE", 3)
        pieces = cut_at_lines(text)
    assert "".join(pieces) == text
    assert reads_lines_alone(tokenizer)
    ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece).ids]
    assert ids == tokenizer.encode(text).ids


def test_texts_of_other_tokenizers_are_not_cut() -> None:
    others = [Tokenizer.from_str(tokenizer.to_str()) for _ in range(3)]
    others[0].normalizer = normalizers.Strip()
    others[1].pre_tokenizer = pre_tokenizers.ByteLevel()
    others[2].add_special_tokens(["<\n>"])
    assert not any(map(reads_lines_alone, others))


def test_a_long_text_is_sampled_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.model.tokenizer.SAMPLE_CHARS", 4000)
    monkeypatch.setattr("kvasir.model.tokenizer._PIECE", 100)
    texts = ["\n" + f"word{i:03}" * 30 for i in range(100)]
    read = list[int]()
    trained = train_tokenizer(texts, 400, progress=lambda _, __, total: read.append(total))
    assert max(read) == 4000 // len(texts[0])
    numbers = [int(token[-3:]) for token in trained.get_vocab() if token[-3:].isdecimal()]
    assert (min(numbers) < 10, max(numbers) > 90) == (True, True)
    short = texts[:10]
    assert train_tokenizer(short, 300).to_str() == train_tokenizer(["".join(short)], 300).to_str()


def test_training_is_repeatable() -> None:
    assert train_tokenizer(CORPUS * 3, 320).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("vocab_size", [-1, 0, 256])
def test_a_vocabulary_that_cannot_hold_every_byte_is_refused(vocab_size: int) -> None:
    with pytest.raises(
        TokenizerError, match=rf"vocab_size must be at least 257 .*, not {vocab_size}$"
    ):
        train_tokenizer(CORPUS, vocab_size)


def test_the_smallest_vocabulary_is_the_bytes() -> None:
    smallest = train_tokenizer(CORPUS, 257)
    assert vocabulary_size(smallest) == 257
    assert len(smallest.encode("漢").ids) == 3
    assert smallest.decode(smallest.encode("".join(CORPUS)).ids) == "".join(CORPUS)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "tokenizer.json", tmp_path):  # a folder is no file
        with pytest.raises(TokenizerError, match=f"^{path} does not exist$"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"{", b"\xff\xfe\x00", b'{"model": {"type": "BPE"}}']
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path} is not a tokenizer: ")
    assert "\n" not in str(caught.value)


def with_damaged_charsmap(whole: Tokenizer, start: int | None) -> Tokenizer:
    """Return a tokenizer that panics at characters whose UTF-8 begins with `start`, if given.

    Its charsmap changes no character. An entry of its trie leads beyond the end.
    """
    units = [0] * 256
    if start is not None:
        units[start] = 0x1FFFFF << 10 | start
    damaged = Tokenizer.from_str(whole.to_str())
    damaged.normalizer = normalizers.Precompiled(struct.pack("<257I", 4 * 256, *units))
    return damaged


@pytest.mark.parametrize("start", [None, ord("a"), 0xC3, 0xEF])
def test_a_tokenizer_that_panics_is_refused(tmp_path: Path, start: int | None) -> None:
    """Whatever escapes hide the name of its charsmap."""
    path, text = tmp_path / "tokenizer.json", with_damaged_charsmap(tokenizer, start).to_str()
    for name in ("precompiled_charsmap", r"precompiled_charsm\u0061p"):
        path.write_text(text.replace("precompiled_charsmap", name))
        if start is None:
            assert load_tokenizer(path).encode("a\u00e9").ids == tokenizer.encode("a\u00e9").ids
        else:
            message = "its precompiled_charsmap is damaged: index out of"
            with pytest.raises(TokenizerError, match=message):
                load_tokenizer(path)


def nested(n: int, *inner: Any) -> Any:
    """Replacements that each make six characters of one: n of them, in sequences in sequences."""
    part = normalizers.Sequence([normalizers.Replace("a", "a" * 6), *inner])
    return part if n == 1 else nested(n - 1, part)


def words(**changes: Any) -> models.WordPiece:
    return models.WordPiece({"[UNK]": 0, "a": 1}, **changes)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def charsmap(value: bytes) -> normalizers.Normalizer:
    """A charsmap that changes no character, and the texts that it could make."""
    return normalizers.Precompiled(struct.pack("<257I", 4 * 256, *[0] * 256) + value)


COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "growth": ({"normalizer": nested(6)}, "up to 9.33e+04 times as long"),
    "growth at a place": (
        {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("(?=a)"), "a")] * 20)},
        "times as long",
    ),
    "growth everywhere": ({"normalizer": normalizers.Replace("", "a" * 100)}, "times as long"),
    "a prefix": ({"normalizer": normalizers.Prepend("a" * 10**6)}, "times as long"),
    "a charsmap": ({"normalizer": charsmap(b"\0" + b"a" * 10**6)}, "times as long"),
    "bytes of bytes": (
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 9)},
        "times as long",
    ),
    "growth of an answer": (
        {"decoder": decoders.Sequence([decoders.Replace("a", "a" * 99)] * 9)},
        "times as long",
    ),
    "steps": ({"normalizer": normalizers.Sequence([normalizers.NFC()] * 10**4)}, "10003 steps"),
    "repeated texts": (
        {"post_processor": processors.TemplateProcessing(single="$A $A", special_tokens=[])},
        "makes ['A', 'A'] of texts ['A']",
    ),
    "tokens around": (
        {
            "post_processor": processors.TemplateProcessing(
                single="x " * 10**4 + "$A", special_tokens=[("x", 0)]
            )
        },
        "adds 10000 ",
    ),
    "a long word": ({"model": words(max_input_chars_per_word=10**6)}, "words of 1000000"),
    "a long affix": (
        {"model": words(continuing_subword_prefix="#" * 10**6)},
        "an affix of 1000000",
    ),
    "a long token": ({"model": models.BPE({"a" * 10**6: 0}, [])}, "a token of 1000000"),
    "long pieces": (
        {"model": models.Unigram([("a" * n, -1.0) for n in range(1, 2000)], 0)},
        "a piece of 1999",
    ),
    **{
        pattern: ({"pre_tokenizer": split(pattern)}, "takes too long for repeated characters")
        for pattern in ("(a+)+$", r"(a)\1*b", r"\s*\s*x", "(?:ab)*(?:ab)*c", "a*[^a-z]", "a+'s")
    },
    "a pattern of a replacement": (
        {"normalizer": normalizers.Replace(Regex("(a|b)*c"), "")},
        "takes too long for repeated characters",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_tokenizer_that_may_take_far_more_than_its_text_is_refused(
    tmp_path: Path, name: str
) -> None:
    """It could hang the server at a few characters: no call of tokenizers can be stopped."""
    parts, problem = COSTLY[name]
    path = tmp_path / "tokenizer.json"
    changed(**parts).save(str(path))
    with pytest.raises(TokenizerError, match=f"^{re.escape(str(path))}: .*{re.escape(problem)}"):
        load_tokenizer(path)


def test_tokens_that_are_put_around_texts_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    around = processors.TemplateProcessing(single="x $A", special_tokens=[("x", 5000)])
    changed(post_processor=around).save(str(path))
    with pytest.raises(TokenizerError, match="token ids up to 5000, but the model only 320"):
        load_tokenizer(path, 320)


def test_a_tokenizer_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(OSError, match="more than 67,108,864 bytes"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "pattern",
    [
        *(row.pattern for row in gguf._PRE_TOKENIZERS.values() if row.pattern),
        *(" {2,}", r"\s+", "[\r\n]", r"\s?\p{L}+", "[0-9][0-9][0-9]", r"\w+|[^\w\s]+"),
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"<\|startoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"[!\"'()*+,\-./:;<=>?@\[\\\]^_`{|}~&][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+".replace(" ?", "| ?", 1),
    ],
)
def test_published_patterns_need_no_trial(pattern: str) -> None:
    """It takes a second of each start."""
    assert tokenizer_limits._is_linear(pattern)


def test_unknown_patterns_and_many_replacements_are_taken_if_they_cost_little(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    spaces = [
        normalizers.Replace(Regex(pattern), " ") for pattern in (r"\s+", r"[\r\n]+", " {2,}") * 3
    ]
    parts = {"normalizer": normalizers.Sequence([normalizers.NFKC(), *spaces])}
    pattern = r" ?[^(\s|[.,!?])]+|(?:\p{Han}|x)+"
    changed(pre_tokenizer=split(pattern), **parts).save(str(path))
    assert load_tokenizer(path).encode("a").ids


def test_a_loaded_tokenizer_neither_cuts_nor_pads_nor_leaves_anything_to_chance(
    tmp_path: Path,
) -> None:
    """Published files may truncate, pad, and have the dropout of their training."""
    erratic = Tokenizer.from_str(tokenizer.to_str())
    erratic.enable_truncation(4)
    erratic.enable_padding(length=16)
    erratic.model.dropout = 0.5
    erratic.save(str(tmp_path / "tokenizer.json"))
    text = "".join(CORPUS)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


def test_vocabulary_size_counts_gaps_between_ids() -> None:
    """The number of tokens would be too few rows for the largest id."""
    size = tokenizer.get_vocab_size()
    assert vocabulary_size(tokenizer) == size
    description = json.loads(tokenizer.to_str())
    last = max(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    description["model"]["vocab"][last] = 5000
    gapped = Tokenizer.from_str(json.dumps(description))
    assert gapped.get_vocab_size() == size
    assert vocabulary_size(gapped) == 5001


def changed(**parts: Any) -> Tokenizer:
    other = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(other, name, part)
    return other


LONGEST = [
    (made, longest_token(made))
    for made in (tokenizer, changed(normalizer=normalizers.NFC()), sentence_pieces())
]


@given(st.text(max_size=200), st.sampled_from(range(3)))
@example("\u03b1\u0313\u0300\u0345" * 50, 1)  # four characters become one
@example(END_OF_TEXT * 3, 0)
@example(" " * 99, 2)
def test_no_token_stands_for_more_characters_than_the_longest(text: str, number: int) -> None:
    made, longest = LONGEST[number]
    assert longest is not None
    assert len(text) <= longest * len(made.encode(text).ids)


def test_no_token_is_the_longest_where_characters_can_vanish() -> None:
    stripping = changed()
    stripping.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))  # noqa: S106
    for made in (
        stripping,
        words,
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.Replace("ab", "c")),
        changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(pre_tokenizer=pre_tokenizers.Digits()),  # characters that are no bytes are left out
    ):
        assert longest_token(made) is None
