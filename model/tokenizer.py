"""Tokenizers: train a byte-level BPE on text, or load a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvasir.model.platform.files import read_limited
from kvasir.model.platform.progress import Progress, interruptible, no_progress
from kvasir.model.tokenizer_limits import MAX_FILE, MOST_GROWTH, check_costs, steps

END_OF_TEXT = "<|endoftext|>"
MASKS = ("[MASK]", "<mask>")  # BERT's name, and RoBERTa's
_FIRST, _LAST = "[CLS]", "[SEP]"
# No token crosses the boundary of one of these: an indentation, a line break, a name, up to three
# digits, punctuation, spaces.
_WORDS = r"(?<=\n)[^\S\n]+|\n| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+"

SAMPLE_CHARS = 20_000_000  # that a tokenizer is trained on at most
_PIECE = 2**16  # characters

_MAPPED = range(0x1D000, 0x20000)  # further characters that NFKC maps to others

# Steps that leave at least as many characters as they get, unless characters are found and removed.
_KEEPING = {
    *("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits"),
    *("Split", "Punctuation"),
}


TokenizerKind = Literal["decoder", "encoder", "encoder-decoder"]


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained or loaded."""


def train_tokenizer(
    texts: Sequence[str],
    vocab_size: int,
    kind: TokenizerKind = "decoder",
    progress: Progress = no_progress,
) -> Tokenizer:
    """Train a byte-level BPE with `<|endoftext|>` as token 0, or an encoder's special tokens.

    An encoder's tokenizer puts [CLS] before a text and [SEP] after it, and has [MASK]. That of an
    encoder-decoder puts `<|endoftext|>` after it.

    Sennrich et al. 2016; Radford et al. 2019. No token crosses a line break or the end of a line's
    indentation, so a prompt that ends there is cut where the training text was. Any text
    round-trips; `<|endoftext|>` in it is read as that token, which decoding leaves out by default.
    Of more than SAMPLE_CHARS characters a sample is read, from everywhere in the texts. Raises
    TokenizerError when `vocab_size` cannot hold the 256 bytes and the special token.
    """
    special = [_FIRST, _LAST, MASKS[0]] if kind == "encoder" else [END_OF_TEXT]
    if vocab_size < (least := 256 + len(special)):
        allowed = f"at least {least} (256 bytes and {', '.join(special)})"
        raise TokenizerError(f"vocab_size must be {allowed}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = _sample([piece for text in texts for piece in cut_at_lines(text)])
    what = "training the tokenizer"

    def read(is_over: Event) -> Iterator[str]:
        for done, text in enumerate(sample):
            if is_over.is_set():
                return
            progress(what, done, len(sample))
            yield text
        progress(what, 0, 0)  # joining tokens reports nothing

    interruptible(lambda is_over: tokenizer.train_from_iterator(read(is_over), trainer))
    if kind == "encoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_FIRST} $A {_LAST}",
            pair=f"{_FIRST} $A {_LAST} $B {_LAST}",
            special_tokens=[(_FIRST, 0), (_LAST, 1)],
        )
    elif kind == "encoder-decoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
        )
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def reads_lines_alone(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a text are those of its `cut_at_lines`, one after another."""
    own = tokenizer.pre_tokenizer
    is_ours = own is not None and own.__getstate__() == _pre_tokenizer().__getstate__()
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        is_ours
        and tokenizer.normalizer is None
        and not any("\n" in token.content for token in added)
    )


def cut_at_lines(text: str) -> list[str]:
    """Cut a long text before line breaks: a lone one takes far longer to tokenise."""
    ends, start = list[int](), 0
    while len(text) - start > _PIECE:
        end = text.find("\n", start + _PIECE)
        if end < 0:
            break
        ends.append(end)
        start = end
    return [text[i:j] for i, j in pairwise([0, *ends, len(text)])]


def _sample(pieces: list[str]) -> list[str]:
    """Return pieces spread evenly, so that they have at most SAMPLE_CHARS characters together."""
    total = sum(map(len, pieces))
    share = min(1.0, SAMPLE_CHARS / total) if total else 1.0
    kept, n_kept, n_seen = list[str](), 0, 0
    for piece in pieces:
        n_seen += len(piece)
        if n_kept + len(piece) <= share * n_seen or share == 1.0:
            kept.append(piece)
            n_kept += len(piece)
    return kept or [piece[:SAMPLE_CHARS] for piece in pieces[:1]]


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """Read a tokenizer.json of up to `vocab_size` ids. Raises TokenizerError for another file.

    Truncation and padding are dropped: they would silently shorten documents and prompts. So is
    dropout, by which a BPE leaves out joins at random.
    """
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist")
    return parse_tokenizer(read_limited(path, MAX_FILE), path, vocab_size)


def parse_tokenizer(content: bytes, path: Path, vocab_size: int | None = None) -> Tokenizer:
    """Return the same of a tokenizer.json's content; `path` is for errors."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
    try:
        check_costs(tokenizer)
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from None
    if any(step["type"] == "Precompiled" for step in steps(tokenizer.normalizer)):
        _check_charsmap(tokenizer, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    if vocab_size is not None:
        check_tokenizer(tokenizer, path, vocab_size)
    return tokenizer


def _check_charsmap(tokenizer: Tokenizer, path: Path) -> None:
    """Raise TokenizerError if a charsmap leads beyond itself, or makes long texts of characters.

    It is not checked when it is read.
    """
    problem = f"{path}: its precompiled_charsmap is damaged: "
    for code in (*range(0xD800), *range(0xE000, 0x10000), *_MAPPED) if tokenizer.normalizer else ():
        text = chr(code)
        try:
            with panics_as_errors():
                made = tokenizer.normalizer.normalize_str(f"{text}\u0300")
        except RuntimeError as error:
            raise TokenizerError(f"{problem}{error}") from None
        if len(made.encode()) > MOST_GROWTH * len(text.encode()):
            raise TokenizerError(f"{problem}it makes {len(made)} characters of {text!r}")


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of tokenizers, which is no Exception, as a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None


def check_tokenizer(tokenizer: Tokenizer, path: Path, vocab_size: int) -> None:
    """Raise TokenizerError if a tokenizer has more than `vocab_size` ids."""
    around = max([*tokenizer.encode("").ids, *tokenizer.encode("", "").ids], default=-1)
    if (largest := max(vocabulary_size(tokenizer) - 1, around)) >= vocab_size:
        raise TokenizerError(
            f"{path} has token ids up to {largest}, but the model only {vocab_size} tokens"
        )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one; ids may have gaps, so there may be fewer tokens."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the number of characters that a token can stand for; None if there is no such number.

    There is none where a part drops characters, or makes one token of any number of them. NFC and
    NFKC make one character of up to four, which is the longest canonical decomposition.
    """
    shrinks, kinds = 1, set()
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        for step in steps(part):
            kind = step["type"]
            kinds.add(kind)
            if kind in ("NFC", "NFKC"):
                shrinks = 4
            elif kind == "Replace":
                text = step["pattern"].get("String")
                if text is None or len(text) > len(step["content"]):
                    return None
            elif kind not in _KEEPING or step.get("behavior") == "Removed":
                return None
    vocabulary, model = tokenizer.get_vocab(), tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    if "ByteLevel" in kinds:
        bytes_held = set(pre_tokenizers.ByteLevel.alphabet())
    else:
        bytes_held = {f"<0x{byte:02X}>" for byte in range(256)} if model.byte_fallback else {""}
    added = tokenizer.get_added_tokens_decoder().values()
    if not bytes_held <= vocabulary.keys() or any(token.lstrip or token.rstrip for token in added):
        return None
    return shrinks * max(map(len, vocabulary))


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before any text, such as Llama's BOS."""
    return _surrounding_ids(tokenizer)[0]


def trailing_ids(tokenizer: Tokenizer) -> list[int]:
    """Return those that it puts after any text, such as BERT's [SEP]."""
    return _surrounding_ids(tokenizer)[1]


def _surrounding_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    mark = 2**32 - 1  # no token's id: stands for the text
    text = tokenizer.encode("", add_special_tokens=False)
    text.pad(len(text.ids) + 1, direction="left", pad_id=mark)
    ids = tokenizer.post_process(text).ids
    place = ids.index(mark)
    return ids[:place], ids[place + 1 :]


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of its special tokens."""
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def keep_spaces_in_offsets(tokenizer: Tokenizer) -> None:
    """Let a token's offsets cover its spaces, which some post-processors, as GPT-2's, leave out."""
    processor = tokenizer.post_processor
    if processor is None:
        return
    state = json.loads(
        processor.__getstate__(),
        object_hook=lambda state_of: (
            state_of | {"trim_offsets": False} if "trim_offsets" in state_of else state_of
        ),
    )
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.post_processor = processor
