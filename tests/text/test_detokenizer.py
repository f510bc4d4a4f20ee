"""Incremental text against decoding all at once, and stop strings against a naive search."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from kvasir.server.text.detokenizer import (
    Detokenizer,
    StopChecker,
    token_bytes,
    token_name,
    token_text,
)
from tests.kit.sentence_pieces import sentence_pieces
from tests.kit.serving import EOS, small_tokenizer

tokenizer = small_tokenizer()
N = tokenizer.get_vocab_size()

texts = st.text(alphabet="aå漢🙂 d", max_size=30)
token_ids = st.lists(st.integers(0, N - 1), max_size=20)


def shown(ids: list[int], prompt_ids: list[int], kept: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids, kept)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.n_chars == sum(map(len, pieces))
    return pieces


@given(texts, texts)
def test_pieces_join_to_the_text_and_hold_whole_characters(prompt: str, text: str) -> None:
    pieces = shown(tokenizer.encode(text).ids, tokenizer.encode(prompt).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(token_ids, token_ids)
def test_any_tokens_join_to_what_decoding_them_at_once_gives(
    prompt_ids: list[int], ids: list[int]
) -> None:
    """Broken bytes and special tokens too. The prompt never leaks into the text."""
    context = prompt_ids[-8:]
    if tokenizer.decode(context).endswith("\ufffd"):
        context = []
    text = tokenizer.decode(context + ids)[len(tokenizer.decode(context)) :]
    assert "".join(shown(ids, prompt_ids)) == text

    with_special = ""
    for is_special, run in groupby(ids, lambda i: i == EOS):
        segment = list(run)
        if is_special:
            with_special += "<|endoftext|>" * len(segment)
        else:
            whole = tokenizer.decode(context + segment)
            with_special += whole[len(tokenizer.decode(context)) :]
            context = []
    assert "".join(shown(ids, prompt_ids, frozenset({EOS}))) == with_special


broken = st.sampled_from([i for i in range(N) if token_bytes(tokenizer, i)[:1] > b"\x7f"])


@given(st.lists(broken, min_size=20, max_size=60))
def test_broken_bytes_are_not_held_back_until_the_end(ids: list[int]) -> None:
    """They would be decoded again with each further one."""
    pieces = shown(ids, [])
    assert "".join(pieces) == tokenizer.decode(ids)
    silences = (len(list(run)) for is_text, run in groupby(pieces, bool) if not is_text)
    assert max(silences, default=0) <= 16


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: the shortest prefix that ends in a stop string, without the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_cut_at_the_same_place_however_the_text_is_split(
    pieces: list[str], stops: list[str]
) -> None:
    expected, stopped = cut_at_first_stop("".join(pieces), stops)
    checker = StopChecker(stops)
    out = ""
    for piece in pieces:
        out += checker.push(piece)
        assert expected.startswith(out), "text that belongs to a stop string was shown"
    out += checker.flush()
    assert (out, checker.stopped) == (expected, stopped)


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\ndef"])
    assert checker.push("x = 1\n") == "x = 1"
    assert checker.push("y") == "\ny"


PIECES = sentence_pieces()


def test_a_broken_byte_takes_nothing_back_that_was_shown() -> None:
    """Where bytes are tokens, decoding them at once shows none of those next to a broken one."""
    (letter,) = PIECES.encode("b").ids[-1:]
    for ids, text in (
        ([0x0A, 0xE2, letter], "\n\ufffdb"),
        ([*"🙂".encode(), 0x80, letter, letter], "🙂\ufffdbb"),
        ([letter, 0xE2, 0x82, 0xAC, 0x80], "b€\ufffd"),
    ):
        detokenizer = Detokenizer(PIECES, PIECES.encode("a").ids)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text


@given(texts)
def test_the_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    assert b"".join(token_bytes(tokenizer, i) for i in tokenizer.encode(text).ids) == text.encode()
    begun = f" {text}" if text else ""
    assert b"".join(token_bytes(PIECES, i) for i in PIECES.encode(text).ids) == begun.encode()


@given(st.lists(st.integers(0, PIECES.get_vocab_size() - 1), max_size=8))
def test_a_token_inside_a_text_has_the_bytes_that_it_adds(ids: list[int]) -> None:
    (begin,) = PIECES.encode("a").ids
    assert (PIECES.decode([begin]), token_text(PIECES, begin)) == ("a", " a")
    whole = PIECES.decode([begin, *ids], skip_special_tokens=False)
    added = b"".join(token_bytes(PIECES, i) for i in ids)
    if "\ufffd" not in whole:
        assert whole == "a" + added.decode()


def test_a_token_is_named_by_its_text_or_else_by_its_bytes() -> None:
    """A special token has a text too, and an id without a token adds nothing."""
    texts = [token_text(tokenizer, i) for i in range(N)]
    names = [token_name(tokenizer, i) for i in range(N)]
    assert texts == [tokenizer.decode([i], skip_special_tokens=False) for i in range(N)]
    assert len(set(names)) == N
    assert all(n == text for n, text in zip(names, texts, strict=True) if "\ufffd" not in text)
    assert "bytes:\\xe6" in names
    assert names[EOS] == "<|endoftext|>"
    assert token_bytes(tokenizer, N) == b""
