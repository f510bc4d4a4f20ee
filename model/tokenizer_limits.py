"""Limits on what a tokenizer.json may cost: others wrote it, and nothing can stop tokenizers.

Sizes are in bytes of UTF-8, as texts are limited.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from base64 import b64decode
from collections.abc import Iterable
from itertools import product
from string import printable
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from kvasir.model.platform.limited_process import (
    LimitedProcess,
    answer,
    limit_memory,
    limit_time,
    messages,
)

MAX_FILE = 2**26  # published ones have up to 2**25
MOST_GROWTH = 100  # of a text; of published ones up to 70, on one character
_MOST_STEPS, _MOST_ADDED, _LONGEST_AFFIX = 32, 64, 16
_LONGEST_WORD = 256  # of WordPiece, whose time has its cube
_LONGEST_TOKEN, _LONGEST_PIECE = 4096, 128  # a Unigram tries all pieces everywhere
# The growth of a character, at most. Of these steps a second one finds nothing left to do.
_UNICODE = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5}
_GROWTH = {"BertNormalizer": 3.0, "ByteLevel": 2.0, "Metaspace": 4.0}
_SPACES = " {2,}"  # SentencePiece's, the shortest of which is two bytes

# The parts of published patterns. GPT-4o's contractions stand where END is.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE, _MARKS = r"[^\r\n\p{L}\p{N}]?", r"\p{Lm}\p{Lo}\p{M}]"
CASED = rf"{_BEFORE}[\p{{Lu}}\p{{Lt}}{_MARKS}*[\p{{Ll}}{_MARKS}+END|" + (
    rf"{_BEFORE}[\p{{Lu}}\p{{Lt}}{_MARKS}+[\p{{Ll}}{_MARKS}*END|"
)
# Alternatives whose time is linear: once a repetition has begun, nothing after it can fail.
_ONE = r"(?:\\(?:[pP]\{\w+\}|[sSdDwWnrtfv]|\W)|\[\^?(?:\\.|[^]\\[&]|&(?!&))+\]|[^][\\(){}|?*+^$])"
_BRANCH = (
    rf"(?>\\s\+\(\?!\\S\)|(?:\(\?<=\\n\))?(?:{_ONE}(?![?*+{{])){{0,32}}+(?:{_ONE}\?){{0,4}}+"
    rf"(?:{_ONE}(?![?*+{{])){{0,4}}+(?:{_ONE}\{{\d(?:,\d)?\}})?+"
    rf"(?:{_ONE}(?:[+*]|\{{\d,\}})(?:{_ONE}\*)*+)?+)"
)
_EMPTY = re.compile(r"(?:^|[|*?]|\{0,\d\})(?:\||$)")  # an end of one that may match nothing
_LINEAR = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*+")
# A pattern that takes longer for so many equal characters takes a minute for a long prompt.
_PROBE, _PROBE_SECONDS, _PROBE_MEMORY = 2**14, 0.1, 2**27


def steps(part: Any) -> list[dict[str, Any]]:
    """Return the states of a tokenizer's part, or of those that it consists of."""
    states: list[dict[str, Any]] = []
    rest = [] if part is None else [json.loads(part.__getstate__())]
    while rest:
        state = rest.pop()
        if state["type"] == "Sequence":
            rest += reversed(next(value for name, value in state.items() if name != "type"))
        else:
            states.append(state)
    return states


def check_costs(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer whose time or memory a text does not bound."""
    before = [*steps(tokenizer.normalizer), *steps(tokenizer.pre_tokenizer)]
    after, added = steps(tokenizer.decoder), steps(tokenizer.post_processor)
    if (n := len(before) + len(after) + len(added)) > _MOST_STEPS:
        raise ValueError(f"its {n} steps are too many: at most {_MOST_STEPS} are run")
    for some in (before, after):
        if (growth := _growth(some)) > MOST_GROWTH:
            raise ValueError(
                f"it makes texts up to {growth:.3g} times as long; at most {MOST_GROWTH} is safe"
            )
    for step in (step for step in added if step["type"] == "TemplateProcessing"):
        for form, wanted in (("single", ["A"]), ("pair", ["A", "B"])):
            texts = sorted(part["Sequence"]["id"] for part in step[form] if "Sequence" in part)
            marks = [part["SpecialToken"]["id"] for part in step[form] if "SpecialToken" in part]
            known_tokens = step["special_tokens"]  # one that is missing makes tokenizers panic
            n_added = sum(
                len(known_tokens[mark]["ids"]) if mark in known_tokens else math.inf
                for mark in marks
            )
            if texts != wanted or n_added > _MOST_ADDED:
                raise ValueError(
                    f"its post_processor makes {texts} of texts {wanted}, and adds {n_added} "
                    f"tokens; each text once, and at most {_MOST_ADDED} tokens, are safe"
                )
    if any(max(step.get("start", 0), step.get("stop", 0)) > _LONGEST_AFFIX for step in after):
        raise ValueError(f"its decoder strips more than {_LONGEST_AFFIX} characters")
    _check_model(tokenizer)
    patterns = {step["pattern"].get("Regex") for step in (*before, *after) if "pattern" in step}
    _check_patterns(sorted(pattern for pattern in patterns - {None} if not _is_linear(pattern)))


def _growth(some: list[dict[str, Any]]) -> float:
    """Return the length of a text after steps, for each byte that it has before."""
    unicode, other = [1.0], [1.0]
    for step in some:
        kind = step["type"]
        if kind == "Replace":
            n, pattern = len(step["content"].encode()), step["pattern"].get("Regex")
            least = len(step["pattern"].get("String", "").encode())  # bytes that it replaces
            if pattern is not None and _is_linear(pattern) and not _EMPTY.search(pattern):
                least = 2 if pattern == _SPACES else 1
            other.append(max(1, n / least) if least else 1 + n)
        elif kind == "Prepend":
            other.append(1 + len(step["prepend"].encode()) // 4)
        elif kind == "Precompiled":
            charsmap = b64decode(step["precompiled_charsmap"])  # size of a trie, the trie, values
            values = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
            unicode.append(max(map(len, values.split(b"\0"))) / 3)
        unicode.append(_UNICODE.get(kind, 1.0))
        other.append(_GROWTH.get(kind, 1.0))
    return max(unicode) * math.prod(other)


def _check_model(tokenizer: Tokenizer) -> None:
    model = tokenizer.model
    is_unigram = isinstance(model, models.Unigram)
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    for what, n, most in (
        ("words", getattr(model, "max_input_chars_per_word", 0), _LONGEST_WORD),
        ("a token", _longest(tokenizer.get_vocab()), _LONGEST_TOKEN),
        ("a piece", _longest(tokenizer.get_vocab(False)) if is_unigram else 0, _LONGEST_PIECE),
        (
            "an affix",
            _longest(getattr(model, affix, None) or "" for affix in affixes),
            _LONGEST_AFFIX,
        ),
    ):
        if n > most:
            raise ValueError(f"it has {what} of {n} characters; at most {most} are safe")


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _is_linear(pattern: str) -> bool:
    """Return whether the time of a pattern is known to grow with the text alone."""
    pattern = pattern.replace("\r\n", r"\r\n").removesuffix(SPACES)
    pattern = pattern.replace(f"{CONTRACTIONS}?", "'*").replace(CONTRACTIONS, "'")
    for cased in (CASED.replace("END", ""), CASED.replace("END", "'*")):
        pattern = pattern.replace(cased, "'|")
    return _LINEAR.fullmatch(pattern) is not None


def _check_patterns(patterns: list[str]) -> None:
    """Raise ValueError for a pattern that takes too long for a run of equal characters."""
    if patterns:
        process = LimitedProcess(__name__)
        for pattern in patterns:
            try:
                process.ask(pattern)
            except ChildProcessError:
                raise ValueError(
                    f"its pattern {pattern[:80]!r} takes too long for repeated characters"
                ) from None
        process.close()


def _main() -> None:
    """Answer each pattern whose time is in proportion; another ends the process."""
    kinds = {
        unicodedata.category(character): character for character in map(chr, reversed(range(2**16)))
    }
    kinds.pop("Cs")
    limit_memory(_PROBE_MEMORY)
    for message in messages():
        pattern = json.loads(message)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        words = re.findall(r"\w+", pattern)
        runs = dict.fromkeys((*pattern, *words, "\n", *kinds.values()))  # the likeliest first
        end = printable + "".join(runs)  # so that no match is ruled out beforehand
        for run, after in product(runs, ("", f"\n{end}", f"\0{end}", f"z{end}")):
            limit_time(_PROBE_SECONDS)
            split.pre_tokenize_str(run * (_PROBE // len(run)) + after)
        limit_time(0)
        answer(None)


if __name__ == "__main__":
    _main()
