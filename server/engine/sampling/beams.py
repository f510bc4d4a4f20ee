"""Beam search for the likeliest texts (Sutskever et al. 2014), with the rules of transformers 5.

Each step keeps the best unfinished texts; those of as many of the best candidates that end are
finished.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from kvasir.server.engine.sampling.params import BeamParams, Floats, likeliest


class Hypothesis(NamedTuple):
    """A text. score: its log-probability or, once it is finished, this / length^length_penalty."""

    score: float
    token_ids: list[int]


class RowCopy(NamedTuple):
    """Tokens from `start` on that one beam's row takes over from another's."""

    source: int
    target: int
    start: int


class BeamSearch:
    """The texts of one search.

    A text's length counts the tokens after the one that starts it; n_given: those before the first
    new one. early_stopping: True stops at `width` finished texts; False when no unfinished one
    would be better if it ended now; "never" when none would be better at its longest, where that
    raises scores.

    running: the unfinished texts, each beam's in its own place, so that a text keeps its row; one
    at first. copies: what rows must take over before the next tokens are run. finished: the best.
    """

    def __init__(
        self, params: BeamParams, ending_ids: AbstractSet[int], n_given: int, max_tokens: int
    ) -> None:
        self.params = params
        self.running = [Hypothesis(0.0, [])]
        self.finished: list[Hypothesis] = []
        self.copies: list[RowCopy] = []
        self._ending_ids = ending_ids
        self._n_given = n_given
        self._max_tokens = max_tokens

    def advance(self, logits: Floats) -> bool:
        """Continue all running texts, given their logits [n, vocab]; return whether it is over."""
        width = self.params.width
        n_tokens = len(self.running[0].token_ids) + 1
        # Enough for `width` that go on, and all that could be ahead of them in their text.
        n_likeliest = min(width + len(self._ending_ids), logits.shape[1])
        candidates = [  # log-probability, the text that it continues, its new token
            (text.score + logprob, place, token_id)
            for place, (text, row) in enumerate(zip(self.running, logits, strict=True))
            for token_id, logprob in likeliest(row, n_likeliest)[1]
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        going: list[tuple[float, int, int]] = []
        for rank, candidate in enumerate(candidates):
            score, place, token_id = candidate
            if n_tokens < self._max_tokens and token_id not in self._ending_ids:
                going.append(candidate)
            elif rank < width:
                text = [*self.running[place].token_ids, token_id]
                self.finished.append(Hypothesis(self._score(score, n_tokens), text))
        going = going[:width]
        self.finished = sorted(self.finished, key=lambda text: -text.score)[:width]
        if not going or (len(self.finished) == width and self._is_settled(going[0][0], n_tokens)):
            return True
        self._continue(going)
        return False

    def _score(self, logprob: float, n_tokens: int) -> float:
        return logprob / _power(self._n_given - 1 + n_tokens, self.params.length_penalty)

    def _is_settled(self, best: float, n_tokens: int) -> bool:
        """Return whether no unfinished text is wanted; best: the highest log-probability of one."""
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0.0:
            n_tokens = self._max_tokens
        return self._score(best, n_tokens) <= self.finished[-1].score

    def _continue(self, going: list[tuple[float, int, int]]) -> None:
        """Give each text a beam: the first that continues another stays in its place."""
        before = self.running
        running: list[Hypothesis | None] = [None] * len(going)
        moved: list[tuple[int, Hypothesis]] = []
        for score, place, token_id in going:
            text = Hypothesis(score, [*before[place].token_ids, token_id])
            if running[place] is None:
                running[place] = text
            else:
                moved.append((place, text))
        self.copies = []
        for source, text in moved:
            place = running.index(None)
            running[place] = text
            start = 0
            if place < len(before):  # equal tokens have equal keys and values
                tokens = zip(before[source].token_ids, before[place].token_ids, strict=True)
                start = self._n_given + next(i for i, (a, b) in enumerate(tokens) if a != b)
            self.copies.append(RowCopy(source, place, start))
        self.running = [text for text in running if text is not None]

    def take_copies(self) -> list[RowCopy]:
        """Return the copies, which the caller then makes."""
        copies, self.copies = self.copies, []
        return copies


@lru_cache(maxsize=4096)
def _power(length: int, penalty: float) -> float:
    """Return length^penalty. That of floats differs between C libraries, that of decimals not."""
    return float(Decimal(length) ** Decimal(penalty))
