"""Inputs of an encoder: tokenised, after a prompt, and truncated where a request asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenizers import Tokenizer

from kvasir.server.engine.encoder.sequence import Encoding
from kvasir.server.errors import ContextLengthError, InvalidRequestError
from kvasir.server.requests.prompts import PromptReader

MAX_INPUTS, MAX_TOKENS = 2048, 2**20  # of a request

Text = str | tuple[str, str]  # a text, or two that are read together
Side = Literal["left", "right"]
# Tokens of an input, with their types: special ones, and -1 for its last text, -2 for the other.
Layout = list[tuple[int, int]]


def encode(
    reader: PromptReader,
    inputs: Sequence[Text | list[int]],
    param: str,
    *,
    prompt: str = "",
    truncate_to: int | None = None,
    side: Side = "right",
) -> list[Encoding]:
    """Return the tokens of each input: a text, a pair, or token ids.

    param: the field that they are in. prompt: precedes each text. truncate_to: the number of tokens
    to which longer inputs are cut, if the model takes so many; None refuses them. side: the end at
    which they are cut. Raises ContextLengthError or InvalidRequestError.
    """
    tokenizer, limit = reader.model_dir.tokenizer, reader.max_model_len
    longest = min(limit, truncate_to or limit)
    sources = [_parts(source, prompt) for source in inputs]
    # A query is in each of its pairs, and is tokenised once.
    texts = list({part for parts in sources if parts is not None for part in parts})
    for text in texts:
        reader.check_text(text, param, limit if truncate_to is None else None)
    tokens = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids_of = {text: encoding.ids for text, encoding in zip(texts, tokens, strict=True)}
    layouts = {n: _layout(tokenizer, n) for n in {len(parts) for parts in sources if parts}}
    encodings, n_all = [], 0
    for place, (source, parts) in enumerate(zip(inputs, sources, strict=True)):
        ids = [ids_of[part] for part in parts or ()]
        n_tokens = len(source)
        if parts is not None:
            n_special = sum(token >= 0 for token, _ in layouts[len(parts)])
            n_tokens = sum(map(len, ids)) + n_special
        if not n_tokens:
            message = f"{param}: input {place} is empty; give at least one token"
            raise InvalidRequestError(message, param=param)
        if n_tokens > limit and truncate_to is None:
            raise ContextLengthError(
                f"{param}: input {place} has {n_tokens} tokens, but the model takes at most "
                f"{limit}; shorten it, or set truncate",
                param=param,
            )
        n_all += min(n_tokens, longest)
        if n_all > MAX_TOKENS:
            raise InvalidRequestError(
                f"{param}: the inputs have more than {MAX_TOKENS} tokens; send fewer at once",
                param=param,
            )
        if isinstance(source, list):
            reader.check_token_ids(source, param)
            cut = slice(-longest, None) if side == "left" else slice(longest)
            encodings.append(Encoding(source[cut], None))
        else:
            if n_tokens > longest:
                ids = _truncated(ids, max(0, longest - n_special), side)
            encodings.append(_arranged(layouts[len(ids)], ids))
    return encodings


def _parts(source: Text | list[int], prompt: str) -> tuple[str, ...] | None:
    """Return the texts to tokenise; None for token ids."""
    if isinstance(source, list):
        return None
    return (prompt + source,) if isinstance(source, str) else source


def _layout(tokenizer: Tokenizer, n_texts: int) -> Layout:
    """Return the tokens of an input of one or two texts, or the text, and their types."""
    marks = [2**32 - 1, 2**32 - 2][:n_texts]  # no tokens' ids
    texts = [tokenizer.encode("", add_special_tokens=False) for _ in marks]
    for text, mark in zip(texts, marks, strict=True):
        text.truncate(0)
        text.pad(1, pad_id=mark)
    whole = tokenizer.post_process(texts[0], texts[1] if texts[1:] else None)
    both = zip(whole.ids, whole.type_ids, strict=True)
    return [
        (marks.index(token) - n_texts if token in marks else token, kind) for token, kind in both
    ]


def _arranged(layout: Layout, texts: list[list[int]]) -> Encoding:
    """Return the encoding of the tokens of one or two texts."""
    parts = [(texts[token] if token < 0 else [token], kind) for token, kind in layout]
    ids = [token_id for part, _ in parts for token_id in part]
    types = [kind for part, kind in parts for _ in part]
    return Encoding(ids, types if len(texts) == 2 else None)


def _truncated(texts: list[list[int]], n_kept: int, side: Side) -> list[list[int]]:
    """Return so many tokens of one or two texts; the longer of two is cut first."""
    kept = [n_kept]
    if len(texts) == 2:
        first, second, half = len(texts[0]), len(texts[1]), n_kept // 2
        n_first = n_kept - min(second, half) if first > second else min(first, half)
        kept = [n_first, n_kept - n_first]
    cuts = zip(texts, kept, strict=True)
    return [ids[max(0, len(ids) - n) :] if side == "left" else ids[:n] for ids, n in cuts]
