"""Inputs of an encoder: tokenised, after a prompt, and truncated where a request asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Encoding as Tokens
from tokenizers import Tokenizer

from server.engine.encoder.sequence import Encoding
from server.errors import ContextLengthError, InvalidRequestError
from server.requests.builder import RequestBuilder

MAX_INPUTS, MAX_TOKENS = 2048, 2**20  # of a request

Text = str | tuple[str, str]  # a text, or two that are read together
Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOptions:
    """The inputs of a request, in one form for every protocol: texts, pairs, or token ids.

    param: the field that they are in. prompt: precedes each text. truncate_to: the number of tokens
    to which longer inputs are cut, if the model takes so many; None refuses them. side: the end at
    which they are cut.
    """

    inputs: Sequence[Text | list[int]]
    param: str
    prompt: str = ""
    truncate_to: int | None = None
    side: Side = "right"


def encode(builder: RequestBuilder, options: EncodingOptions) -> list[Encoding]:
    """Return the tokens of each input. Raises ContextLengthError or InvalidRequestError."""
    tokenizer, limit, param = builder.bundle.tokenizer, builder.max_model_len, options.param
    longest = min(limit, options.truncate_to or limit)
    sources = [_parts(one, options.prompt) for one in options.inputs]
    # A query is in each of its pairs, and is tokenised once.
    texts = list({part for parts in sources if parts is not None for part in parts})
    for text in texts:
        builder.check_text(text, param, limit if options.truncate_to is None else None)
    known = dict(
        zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True)
    )
    encodings, n_all = [], 0
    for place, (source, parts) in enumerate(zip(options.inputs, sources, strict=True)):
        tokens = [known[part] for part in parts or ()]
        n_tokens = len(source)
        if parts is not None:
            n_tokens = sum(map(len, tokens)) + tokenizer.num_special_tokens_to_add(len(parts) == 2)
        if not n_tokens:
            message = f"{param}: input {place} is empty; give at least one token"
            raise InvalidRequestError(message, param=param)
        if n_tokens > limit and options.truncate_to is None:
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
            builder.check_token_ids(source, param)
            cut = slice(-longest, None) if options.side == "left" else slice(longest)
            encodings.append(Encoding(source[cut], None))
        else:
            if n_tokens > longest:
                tokens = _truncated(tokenizer, tokens, longest, options.side)
            whole = tokenizer.post_process(tokens[0], tokens[1] if tokens[1:] else None)
            encodings.append(Encoding(whole.ids, whole.type_ids if len(tokens) == 2 else None))
    return encodings


def _parts(source: Text | list[int], prompt: str) -> tuple[str, ...] | None:
    """Return the texts to tokenise; None for token ids."""
    if isinstance(source, list):
        return None
    return (prompt + source,) if isinstance(source, str) else source


def _truncated(
    tokenizer: Tokenizer, tokens: list[Tokens], longest: int, side: Side
) -> list[Tokens]:
    """Return tokens to add special ones to; of a pair, the longer text is cut first."""
    kept = [max(0, longest - tokenizer.num_special_tokens_to_add(len(tokens) == 2))]
    if len(tokens) == 2:
        first, second, half = len(tokens[0]), len(tokens[1]), kept[0] // 2
        n_first = kept[0] - min(second, half) if first > second else min(first, half)
        kept = [n_first, kept[0] - n_first]
    copies = [Tokens.merge([one]) for one in tokens]
    for copy, n_tokens in zip(copies, kept, strict=True):
        copy.truncate(n_tokens, direction=side)
    return copies
