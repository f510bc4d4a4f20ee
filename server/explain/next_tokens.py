"""The likeliest next tokens, and the change that switching heads off makes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt
from tokenizers import Tokenizer

from kvasir.server.engine.sampling.params import Floats
from kvasir.server.text.detokenizer import token_name


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token that may come next, with its probability at temperature 1."""

    token_id: NonNegativeInt
    text: str
    probability: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class ChangedToken(NextToken):
    """A next token with heads switched off, beside the whole model's figures."""

    logit: float
    whole_probability: Annotated[float, Field(ge=0, le=1)]
    whole_logit: float


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of the next token's distribution that switching heads off makes.

    kl_divergence: of it from the whole model's, in bits. tokens: the likeliest of both.
    """

    kl_divergence: Annotated[float, Field(ge=0)]
    tokens: list[ChangedToken]


def _probabilities(logits: Floats) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.exp(logits - logits.max(), dtype=np.float64)
    shares /= shares.sum()
    return shares


def likeliest(tokenizer: Tokenizer, logits: Floats, top_k: int) -> list[NextToken]:
    """Return the tokens of the largest logits [vocab_size]."""
    probabilities = _probabilities(logits)
    first = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
    return [NextToken(i, token_name(tokenizer, i), float(probabilities[i])) for i in first]


def measure_effect(tokenizer: Tokenizer, logits: Floats, whole: Floats, top_k: int) -> Effect:
    """Compare logits [vocab_size] with the whole model's."""
    after, before = _probabilities(logits), _probabilities(whole)
    both = (np.argsort(-shares, kind="stable")[:top_k].tolist() for shares in (before, after))
    tokens = [
        ChangedToken(
            token_id,
            token_name(tokenizer, token_id),
            float(after[token_id]),
            float(logits[token_id]),
            float(before[token_id]),
            float(whole[token_id]),
        )
        for token_id in dict.fromkeys(token_id for ids in both for token_id in ids)
    ]
    possible = (before > 0) & (after > 0)
    bits = (before[possible] * np.log2(before[possible] / after[possible])).sum()
    return Effect(max(0.0, float(bits)), tokens)
