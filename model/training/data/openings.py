"""The beginnings of held-out texts, with which people can try a model."""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer

from kvasir.model.directory import EXAMPLES_FILE
from kvasir.model.tokenizer import END_OF_TEXT
from kvasir.model.training.data.tokens import TokenData
from kvasir.model.training.data.translations import TranslationData

_N_OPENINGS, _MOST_TOKENS = 3, 24


def example_prompts(tokens: object, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the file of a checkpoint with prompts for what it learns: text, or translations.

    Other models are not given prompts, and have none.
    """
    openings: list[str] = []
    if isinstance(tokens, TranslationData):
        batches = (tokens.held_out(i, i + 1) for i in range(tokens.n_held_out_pairs))
        openings = [tokenizer.decode(batch.sources[0].tolist()) for batch in batches]
    elif isinstance(tokens, TokenData) and tokens.learned is None and tokens.masking is None:
        openings = _openings(tokens, tokenizer)
    chosen = [text for text in dict.fromkeys(openings) if text.strip()][:_N_OPENINGS]
    return {EXAMPLES_FILE: json.dumps(chosen, indent=2).encode() + b"\n"} if chosen else {}


def _openings(tokens: TokenData, tokenizer: Tokenizer) -> list[str]:
    """Return the first words of documents, or of places that are evenly spread without any."""
    ids = np.asarray(tokens.held_out)
    starts = np.flatnonzero(ids == tokenizer.token_to_id(END_OF_TEXT)) + 1
    starts = starts[starts + _MOST_TOKENS < len(ids)]
    if not starts.size:
        starts = np.linspace(0, max(0, len(ids) - _MOST_TOKENS), _N_OPENINGS).astype(int)
    pieces = (tokenizer.decode(ids[at : at + _MOST_TOKENS].tolist()) for at in starts.tolist())
    return [_whole_words(piece) for piece in pieces]


def _whole_words(text: str) -> str:
    """Cut a text where its last space begins, because a word may go on after it."""
    text = text.rstrip()
    words = text.split()
    return text[: text.rindex(words[-1])].rstrip() if len(words) > 1 else text
