"""The tokenizer in a GGUF file's metadata, against tokenizers that share no line with it."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, trainers

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.importing.gguf.tokenizer import read_tokenizer
from tests.kit.huggingface_checkpoints import TEXT, make_tokenizer

TEXTS = [
    "the 12345th line's   text\n\n  that nobody needs; l'Été ÉTÉ 東京 ١٢٣ \t\r\n 'RE 'll x",
    " leading and trailing  ",
    "<|im_start|>user\n<think> the line</think><|im_end|>\n",
    "a\u0301 e\u0301 \u00e9",
    "",
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    known = tokenizer.get_vocab()
    tokens = sorted(known, key=lambda token: known[token])
    tokens += ["<|im_start|>", "<|im_end|>", "<think>", "[PAD305]"]
    kinds = [NORMAL] * len(tokens)
    for token in ("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"):
        kinds[tokens.index(token)] = CONTROL
    kinds[-2:] = [USER_DEFINED, UNUSED]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(kinds, dtype=np.int32),
        "merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def build(values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(read_tokenizer(values).text)


def published(kind: str, values: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that transformers makes of a vocabulary, for a family of its own."""
    made = build(values)
    merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    tokenizer = getattr(transformers, kind)(vocab=made.get_vocab(), merges=merges)
    for token in made.get_added_tokens_decoder().values():
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        if token.special:
            add({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
        else:
            add([token])
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


@pytest.mark.parametrize(("pre", "kind"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
def test_texts_are_cut_as_in_the_published_tokenizer(pre: str, kind: str) -> None:
    values = byte_level(pre)
    ours, theirs = build(values), published(kind, values)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(
            ids, skip_special_tokens=False
        )


# By the definitions in the published files: the words of "I'LL 12345  x\n\n".
WORDS = {
    "llama-bpe": ["I", "'LL", "Ġ", "123", "45", "Ġ", "Ġx", "ĊĊ"],
    "qwen2": ["I", "'LL", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "ĊĊ"],
    "gpt-2": ["I", "'", "LL", "Ġ12345", "Ġ", "Ġx", "ĊĊ"],
    "smollm": ["I", "'", "LL", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "ĊĊ"],
    "tekken": ["I", "'LL", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "ĊĊ"],
    "gpt-4o": ["I'LL", "Ġ", "123", "45", "Ġ", "Ġx", "ĊĊ"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_a_pre_tokenizer(pre: str) -> None:
    cutter: Any = build(byte_level(pre)).pre_tokenizer
    assert [word for word, _ in cutter.pre_tokenize_str("I'LL 12345  x\n\n")] == WORDS[pre]


def test_a_word_of_the_vocabulary_is_a_token_whatever_the_merges() -> None:
    for pre, n_tokens in (("llama-bpe", 1), ("qwen2", 3)):
        values = byte_level(pre)
        values["tokenizer.ggml.tokens"][-1] = "xyz"
        values["tokenizer.ggml.token_type"][-1] = NORMAL
        assert len(build(values).encode("xyz", add_special_tokens=False).ids) == n_tokens


@pytest.mark.parametrize(
    ("pre", "more", "expected"),
    [
        ("llama-bpe", {}, ["<s>", "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
        ("qwen2", {}, ["x"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "x", "<|im_end|>"]),
    ],
)
def test_tokens_around_a_text(pre: str, more: dict[str, Any], expected: list[str]) -> None:
    tokenizer = build(byte_level(pre, **more))
    assert tokenizer.encode("x").tokens == expected
    assert tokenizer.encode("x", "x").tokens == expected * 2


def test_every_token_that_ends_an_answer() -> None:
    """The model's own first; others by their keys and by their usual names."""
    values = byte_level("qwen2")
    tokens = values["tokenizer.ggml.tokens"]
    values["tokenizer.ggml.eot_token_id"] = tokens.index("</s>")
    ends = read_tokenizer(values).ends
    assert [tokens[i] for i in ends] == ["<|im_end|>", "</s>", "<|endoftext|>"]


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Return the metadata of a BPE by scores, with bytes for what it lacks."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator([TEXT.replace(" ", "▁")], trainer)
    known = trained.get_vocab()
    learned = sorted(known, key=lambda token: (len(token) == 1, known[token]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(learned)]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds, dtype=np.int32),
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(learned))], np.float32),
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def merge_by_scores(text: str, values: dict[str, Any]) -> list[str]:
    """Merge the neighbours that make the token of the highest score, the leftmost first."""
    scores = dict(
        zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"], strict=True)
    )
    parts = list(text.replace(" ", "▁"))
    while pairs := [
        (-scores[left + right], i)
        for i, (left, right) in enumerate(pairwise(parts))
        if left + right in scores
    ]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [
        piece
        for part in parts
        for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_scores(prefix: bool) -> None:
    values = sentencepiece(add_space_prefix=prefix)
    tokenizer, generator = build(values), random.Random(0)
    words = [*TEXT.split(), "東京", "  ", "\n", "readtwice"]
    for _ in range(50):
        text = " ".join(generator.choices(words, k=6))
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *merge_by_scores(" " * prefix + text, values)]
        assert tokenizer.decode(encoded.ids) == text


def test_special_tokens_of_sentencepiece() -> None:
    result = read_tokenizer(sentencepiece())
    assert result.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (result.bos, result.ends) == (1, [2])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    "tokens of another type": ({"tokens": np.zeros(3)}, r"tokens is of type ndarray"),
    "types of other tokens": (
        {"token_type": np.zeros(3)},
        r"token_type is not a number for each of 306 tokens",
    ),
    "types that are no numbers": (
        {"token_type": ["x"] * 306},
        r"token_type is not a number for each of 306 tokens",
    ),
    "a token that is too long": (
        {"tokens": ["x" * 1025]},
        r"tokens has one of 1,025 characters, more than 1,024",
    ),
    "no merges": ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
    "merges of unknown tokens": ({"merges": ["☃ ☃"]}, "its tokenizer cannot be built"),
    "no pre-tokenizer": ({"pre": None}, r"tokenizer\.ggml\.pre is"),
    "token twice": ({"tokens": ["x"] * 306}, "has a token twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_tokenizer_that_is_not_whole_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    values = byte_level("qwen2") | {f"tokenizer.ggml.{k}": value for k, value in changes.items()}
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_tokenizer(values)
    assert "\n" not in str(caught.value)
