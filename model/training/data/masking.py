"""Masked tokens: an encoder learns to predict some tokens of a row from all others.

Of a row's tokens 15 % are predicted: 80 % of those are masked, 10 % become any token, and 10 %
stay as they are (Devlin et al. 2019, appendix A.1). A row gets other masks whenever it is drawn
(Liu et al. 2019). It begins and ends with the tokens that the tokenizer puts around a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvasir.model.tokenizer import MASKS, TokenizerError, leading_ids, special_ids, trailing_ids

IGNORED = -100  # target that is not learned; PyTorch's default for cross-entropy
_PREDICTED, _MASKED, _REPLACED = 0.15, 0.8, 0.1


@dataclass(frozen=True, slots=True)
class Masking:
    """The token ids that masking needs, all [n]; special ones are never predicted."""

    mask_id: int
    special: Sequence[int]
    ordinary: Sequence[int]
    leading: Sequence[int]
    trailing: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Masking:
        """Return a tokenizer's. Raises TokenizerError if it has no token for a mask."""
        masks = [i for mask in MASKS if (i := tokenizer.token_to_id(mask)) is not None]
        if not masks:
            names = " or ".join(MASKS)
            raise TokenizerError(f"an encoder's tokenizer needs the token {names}; add one")
        special = special_ids(tokenizer) | {masks[0]}
        ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
        frame = leading_ids(tokenizer), trailing_ids(tokenizer)
        return cls(masks[0], sorted(special), ordinary, *frame)

    def apply(
        self, rows: NDArray[np.int64], generator: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of rows, all int64 [rows, context]."""
        rows = rows.copy()
        rows[:, : len(self.leading)] = self.leading
        rows[:, rows.shape[1] - len(self.trailing) :] = self.trailing
        scores = generator.random(rows.shape)
        scores[np.isin(rows, self.special)] = np.inf
        n_ordinary = np.isfinite(scores).sum(axis=1, keepdims=True)
        n_predicted = np.minimum(n_ordinary, np.maximum(1, np.rint(_PREDICTED * n_ordinary)))
        predicted = scores.argsort(axis=1).argsort(axis=1) < n_predicted
        fate, drawn = generator.random(rows.shape), generator.choice(self.ordinary, rows.shape)
        inputs = np.where(predicted & (fate < _MASKED), self.mask_id, rows)
        replaced = predicted & (fate >= _MASKED) & (fate < _MASKED + _REPLACED)
        return np.where(replaced, drawn, inputs), np.where(predicted, rows, IGNORED)
