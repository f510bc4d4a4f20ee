"""The tokenizer of a GGUF file, as a tokenizer.json.

llama.cpp's "gpt2" is byte-level BPE, whose way to split texts it knows by the name in
`tokenizer.ggml.pre`; its "llama" is SentencePiece's BPE, whose merges follow from its scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer

from kvasir.model.importing.errors import UnsupportedError
from kvasir.model.tokenizer import vocabulary_size
from kvasir.model.tokenizer_limits import CASED, CONTRACTIONS, SPACES

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"
_LONGEST_TOKEN = 1024  # the time to find its merges is quadratic
# The patterns of the published tokenizer.json of each kind.
_LETTERS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _LETTERS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
_QWEN2 = _LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
_TEKKEN = CASED.replace("END", "") + r"\p{N}" + _SIGNS
_GPT4O = CASED.replace("END", f"{CONTRACTIONS}?") + r"\p{N}{1,3}" + _SIGNS


class _PreTokenizer(NamedTuple):
    """A way to cut texts into words."""

    pattern: str | None = None  # None is GPT-2's
    digits: bool = False  # each digit is a word
    whole_words: bool = False  # a word of the vocabulary is a token whatever the merges; BOS first
    nfc: bool = False


# fmt: off
_PRE_TOKENIZERS = {  # by tokenizer.ggml.pre
    name: row
    for names, row in {
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"):
            _PreTokenizer(_LLAMA3, whole_words=True),
        ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"): _PreTokenizer(_LLAMA3),
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"): _PreTokenizer(_QWEN2, nfc=True),
        ("stablelm2", "hunyuan", "solar-open"): _PreTokenizer(_QWEN2),
        ("tekken",): _PreTokenizer(_TEKKEN, whole_words=True),
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"): _PreTokenizer(_GPT4O),
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "gigachat", "mellum",
         "trillion", "granite-docling"): _PreTokenizer(),
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"):
            _PreTokenizer(digits=True),
        ("command-r",): _PreTokenizer(digits=True, nfc=True),
    }.items()
    for name in names
}
# Tokens that end an answer, though a file may name one alone.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
         "<|end_of_text|>", "<end_of_utterance>")
# fmt: on
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # the special tokens of Phi-3 that keep spaces
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer.json and what goes with it."""

    text: str
    special_tokens: dict[str, str]  # texts by names, as bos_token
    bos: int | None
    ends: list[int]  # tokens that end an answer, the model's own first
    size: int  # the largest id plus one


def read_tokenizer(values: Mapping[str, Any]) -> GgufTokenizer:
    """Return the tokenizer in a file's metadata. Raises UnsupportedError for another or none."""
    model, pre = _get(values, "model", str), _get(values, "pre", str, "")
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"its key tokenizer.ggml.model is {model!r}; supported are 'gpt2' and 'llama'; import "
            "the model's folder with tokenizer.json"
        )
    if model == "gpt2" and pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"its key tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_PRE_TOKENIZERS)}; "
            "use the model's folder with tokenizer.json"
        )
    tokens, kinds = _tokens(values)
    ids = _special_ids(values, len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    document: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    if model == "gpt2":
        document |= _byte_level(values, vocabulary, _PRE_TOKENIZERS[pre])
    else:
        unknown = tokens[ids["unknown"]] if ids["unknown"] >= 0 else None
        document |= _sentencepiece(values, vocabulary, unknown)
    keeps_spaces = values.get("general.architecture") != "phi3"
    document["added_tokens"] = _added_tokens(tokens, kinds, keeps_spaces=keeps_spaces)
    starts = _get(
        values, "add_bos_token", bool, model == "llama" or _PRE_TOKENIZERS[pre].whole_words
    )
    ends = _get(values, "add_eos_token", bool, False)
    around = (ids["bos"] if starts else -1, ids["eos"] if ends else -1)
    document["post_processor"] = _template(tokens, *around)
    text = json.dumps(document, ensure_ascii=False)
    try:
        size = vocabulary_size(Tokenizer.from_str(text))
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"its tokenizer cannot be built: {reason}") from None
    last = [ids[name] for name in ("eos", "eot", "eom")]
    last += [vocabulary.get(token, -1) for token in _ENDS]
    return GgufTokenizer(
        text,
        {name: tokens[ids[key]] for key, name in _NAMES.items() if ids[key] >= 0},
        ids["bos"] if ids["bos"] >= 0 else None,
        [i for i in dict.fromkeys(last) if i >= 0 and (kinds[i] == _CONTROL or i == ids["eos"])],
        size,
    )


def _tokens(values: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Return the texts of all tokens, and their kinds."""
    tokens: list[str] = _get(values, "tokens", list)
    if (longest := max(map(len, tokens), default=0)) > _LONGEST_TOKEN:
        raise UnsupportedError(
            f"its key tokenizer.ggml.tokens has one of {longest:,} characters, more than "
            f"{_LONGEST_TOKEN:,}; use the model's folder with tokenizer.json"
        )
    kinds = _numbers(values, "token_type", len(tokens))
    used = [token for token, kind in zip(tokens, kinds, strict=True) if kind != _UNUSED]
    if len(set(used)) != len(used):
        raise UnsupportedError("its key tokenizer.ggml.tokens has a token twice; copy it again")
    return tokens, kinds


def _special_ids(values: Mapping[str, Any], n_tokens: int) -> dict[str, int]:
    """Return the ids of special tokens by names; -1 is none."""
    is_sentencepiece = values.get("tokenizer.ggml.model") == "llama"
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if is_sentencepiece else {}
    ids = {name: _get(values, f"{name}_token_id", int, defaults.get(name, -1)) for name in _IDS}
    for name, i in ids.items():
        if not -1 <= i < n_tokens:
            raise UnsupportedError(
                f"its key tokenizer.ggml.{name}_token_id is {i}, and it has {n_tokens} tokens"
            )
    return ids


def _added_tokens(
    tokens: list[str], kinds: list[int], *, keeps_spaces: bool
) -> list[dict[str, Any]]:
    """Return the tokens that are cut out of a text first. keeps_spaces: those behind them stay."""
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": not keeps_spaces and kinds[i] == _CONTROL and token not in _NOT_STRIPPED,
            "normalized": False,
            "special": kinds[i] != _USER_DEFINED,
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _get(values: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return a key of the tokenizer. Raises UnsupportedError for none, and one of another type."""
    value: Any = values.get(f"tokenizer.ggml.{name}", default)
    texts = not isinstance(value, list) or all(type(item) is str for item in value)
    if type(value) is kind and texts:
        return value
    actual = "missing" if value is None else f"of type {type(value).__name__}"
    raise UnsupportedError(f"its key tokenizer.ggml.{name} is {actual}; convert the model again")


def _numbers(values: Mapping[str, Any], name: str, length: int) -> list[Any]:
    numbers: Any = values.get(f"tokenizer.ggml.{name}")
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    is_list = isinstance(numbers, list) and len(numbers) == length
    if not is_list or not all(type(number) in (int, float) for number in numbers):
        raise UnsupportedError(
            f"its key tokenizer.ggml.{name} is not a number for each of {length} tokens; convert "
            "the model again"
        )
    return list(numbers)


def _byte_level(
    values: Mapping[str, Any], vocabulary: dict[str, int], pre: _PreTokenizer
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if pre.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        split = {"pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **split})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps.append(level | {"use_regex": pre.pattern is None})
    merges = [merge.partition(" ") for merge in _get(values, "merges", list)]
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocabulary,
            "merges": [[left, right] for left, _, right in merges],
        },
    }


def _sentencepiece(
    values: Mapping[str, Any], vocabulary: dict[str, int], unknown: str | None
) -> dict[str, Any]:
    scores = _numbers(values, "scores", len(_get(values, "tokens", list)))
    if str(values.get("general.architecture")).startswith("gemma"):
        scores = list(range(0, -len(scores), -1))  # its scores do not follow the order of merges
    prefix = _get(values, "add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *after],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(vocabulary, scores),
        },
    }


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Return the pairs that make a token of the vocabulary, the highest score first.

    SentencePiece merges any such pair; the order of one token's pairs is that of transformers.
    """
    ranked = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[i], i, vocabulary[left], vocabulary[right], left, right))
    return [[left, right] for *_, left, right in sorted(ranked)]


def _template(tokens: list[str], bos: int, eos: int) -> dict[str, Any] | None:
    """Return the post-processor that puts a token before or after every text; -1 is none."""
    if bos == eos == -1:
        return None

    def part(i: int, type_id: int) -> list[dict[str, Any]]:
        return [] if i < 0 else [{"SpecialToken": {"id": tokens[i], "type_id": type_id}}]

    first, second = (
        [*part(bos, i), {"Sequence": {"id": name, "type_id": i}}, *part(eos, i)]
        for i, name in enumerate("AB")
    )
    special = {
        tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
        for i in (bos, eos)
        if i >= 0
    }
    pair = {"single": first, "pair": [*first, *second], "special_tokens": special}
    return {"type": "TemplateProcessing", **pair}
