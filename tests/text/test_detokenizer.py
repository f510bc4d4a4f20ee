"""Incremental text against decoding everything at once, and stop strings against looking at every prefix."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from server.text.detokenizer import Detokenizer, StopChecker, token_bytes, token_name, token_text
from tests.serving import EOS, small_tokenizer

tokenizer = small_tokenizer()
N = tokenizer.get_vocab_size()

texts = st.text(alphabet="aå漢🙂 d", max_size=30)
token_ids = st.lists(st.integers(0, N - 1), max_size=20)


def shown(ids: list[int], prompt_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.n_chars == sum(map(len, pieces))
    return pieces


@given(texts, texts)
def test_pieces_join_to_the_text_and_none_holds_half_a_character(prompt: str, text: str) -> None:
    ids = tokenizer.encode(text).ids
    pieces = shown(ids, tokenizer.encode(prompt).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(token_ids)
def test_any_tokens_even_broken_bytes_and_special_ones_join_to_what_decoding_them_at_once_gives(
    ids: list[int],
) -> None:
    assert "".join(shown(ids, [])) == tokenizer.decode(ids)


@given(token_ids, token_ids)
def test_the_prompt_never_leaks_into_the_text(prompt_ids: list[int], ids: list[int]) -> None:
    if tokenizer.decode(prompt_ids[-8:]).endswith("\ufffd"):
        expected = tokenizer.decode(ids)
    else:
        expected = tokenizer.decode(prompt_ids[-8:] + ids)[len(tokenizer.decode(prompt_ids[-8:])) :]
    assert "".join(shown(ids, prompt_ids)) == expected


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: the shortest prefix that ends in a stop string, without the longest such string."""
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
    text = "".join(pieces)
    expected, stopped = cut_at_first_stop(text, stops)
    checker = StopChecker(stops)
    out = ""
    for piece in pieces:
        out += checker.push(piece)
        assert expected.startswith(out), "text that belongs to a stop string was shown"
    out += checker.flush()
    assert (out, checker.stopped) == (expected, stopped)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\ndef"])
    assert checker.push("x = 1\n") == "x = 1"
    assert checker.push("y") == "\ny"


def test_a_special_token_has_a_text_of_its_own() -> None:
    assert token_text(tokenizer, EOS) == "<|endoftext|>"
    assert Detokenizer(tokenizer).push(EOS) == ""


def sentence_pieces() -> Tokenizer:
    """As Llama 2's: spaces are a letter of their own, put before any text and taken off it, and bytes are tokens."""
    letters = ["\u2581", *"abde", "\u2581a", "\u00e5", "</s>"]
    vocabulary = {
        token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + letters)
    }
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    spaces = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


PIECES = sentence_pieces()


@given(texts)
def test_the_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    assert b"".join(token_bytes(tokenizer, i) for i in tokenizer.encode(text).ids) == text.encode()
    begun = f" {text}" if text else ""
    assert b"".join(token_bytes(PIECES, i) for i in PIECES.encode(text).ids) == begun.encode()


@given(st.lists(st.integers(0, PIECES.get_vocab_size() - 1), max_size=8))
def test_a_token_inside_a_text_has_the_bytes_that_it_adds(ids: list[int]) -> None:
    (begin,) = PIECES.encode("a").ids
    whole = PIECES.decode([begin, *ids], skip_special_tokens=False)
    added = b"".join(token_bytes(PIECES, i) for i in ids)
    if "\ufffd" not in whole:
        assert whole == "a" + added.decode()


def test_a_token_keeps_the_space_that_it_begins_with() -> None:
    (begin,) = PIECES.encode("a").ids
    assert (PIECES.decode([begin]), token_text(PIECES, begin)) == ("a", " a")


def test_a_tokens_text_is_what_the_decoder_shows_for_it() -> None:
    for token_id in range(N):
        assert token_text(tokenizer, token_id) == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )


def test_a_token_is_named_by_its_text_or_else_by_its_bytes() -> None:
    names = [token_name(tokenizer, i) for i in range(N)]
    assert len(set(names)) == N
    texts = [token_text(tokenizer, i) for i in range(N)]
    assert all(
        name == text for name, text in zip(names, texts, strict=True) if "\ufffd" not in text
    )
    assert "bytes:\\xe6" in names


def test_an_id_without_a_token_adds_nothing() -> None:
    assert token_bytes(tokenizer, N) == b""


@given(token_ids, token_ids)
def test_a_special_token_that_is_kept_shows_and_the_text_goes_on_behind_it(
    prompt_ids: list[int], ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer, prompt_ids, {EOS})
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.flush())
    if tokenizer.decode(prompt_ids[-8:]).endswith("\ufffd"):
        prompt_ids = []
    before = prompt_ids[-8:]
    expected = ""
    for is_kept, run in groupby(ids, lambda i: i == EOS):
        segment = list(run)
        if is_kept:
            expected += "<|endoftext|>" * len(segment)
            continue
        expected += tokenizer.decode(before + segment)[len(tokenizer.decode(before)) :]
        before = []
    assert "".join(pieces) == expected
    assert detokenizer.n_chars == len(expected)
