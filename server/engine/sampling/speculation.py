"""Speculation: draft the next tokens from texts that may tell how a sequence goes on.

Such are its own text so far, where its last tokens have occurred before (Saxena 2023, "Prompt
Lookup Decoding"), and a prediction of the client's. All tokens of a draft are checked in one run,
as in speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

Every new token shows whether a text was right about it, drafted or not. So the hit rate of a text
costs nothing, and a sequence that never repeats itself never drafts. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

MAX_DRAFTED = 32  # tokens of all drafts of a step
_MAX_DRAFT = 8  # tokens
_NGRAM = 3  # last tokens that are looked up; if they are nowhere, one fewer
_NEWEST_WEIGHT = 0.25  # of the newest token in the hit rate
_PREDICTED_HIT_RATE = 0.5  # of a prediction, until it shows its own
# Time of a run without its tokens, in times of one token: operators of our own on AVX2, on which a
# further token costs most (135M parameters in int8; 3.8 after 128 tokens, 3.0 after 1,900).
_EMPTY_RUN = 3.0
_MOST_LONGER = 0.25  # share of its time by which drafts lengthen a step in which some have none


class Source:
    """A text that may tell how a sequence goes on.

    token_ids: int32, of which only the first may be known. place: of the token that comes next;
    None while it tells nothing. hit_rate: a moving share of the tokens that it told right.
    """

    def __init__(
        self, token_ids: NDArray[np.int32], place: int | None = None, hit_rate: float = 0.0
    ) -> None:
        self.token_ids = token_ids
        self.place = place
        self.hit_rate = hit_rate
        self._since = 0  # the place of its last error

    def check(self, token_id: int) -> bool:
        """Return whether the sequence's next token is the one in `place`, and step over it."""
        if self.place is None:
            return False
        is_hit = bool(self.token_ids[self.place] == token_id)
        self.hit_rate += _NEWEST_WEIGHT * (is_hit - self.hit_rate)
        self._since = self.place
        self.place = self.place + 1 if is_hit and self.place + 1 < len(self.token_ids) else None
        return is_hit

    def find(self, last: NDArray[np.int32], n_known: int | None = None) -> None:
        """Go to the place after the sequence's last tokens, of which three count, else two.

        It is the next one after the last error, else the last. n_known: of the sequence's own
        text, of which it is always the last.
        """
        known = self.token_ids[: (n_known or len(self.token_ids)) - 1]  # something follows
        if len(last) < 2 or len(known) < 2:
            return
        ends = np.flatnonzero(known[1:] == last[-1]) + 1
        ends = ends[known[ends - 1] == last[-2]]
        if len(last) >= _NGRAM:
            longer = ends[(ends > 1) & (known[ends - 2] == last[-_NGRAM])]
            ends = longer if longer.size else ends
        if ends.size:
            n_before = ends.size if n_known else int(ends.searchsorted(self._since))
            self.place = int(ends[min(n_before, ends.size - 1)]) + 1


class Speculation:
    """What may follow one sequence of `given_ids` and at most `most_new` new tokens."""

    def __init__(self, given_ids: Tokens[int], most_new: int, prediction: Tokens[int] = ()) -> None:
        self._n = len(given_ids)
        self._token_ids = np.zeros(self._n + most_new, dtype=np.int32)
        self._token_ids[: self._n] = given_ids
        self._own = Source(self._token_ids)
        predicted = np.array(prediction, dtype=np.int32)
        place = 0 if prediction else None
        self._prediction = Source(predicted, place, _PREDICTED_HIT_RATE)

    def add(self, token_id: int) -> bool:
        """Append a new token; return whether the prediction had it in its place."""
        self._token_ids[self._n] = token_id
        self._n += 1
        last = self._token_ids[max(0, self._n - _NGRAM) : self._n]
        self._own.check(token_id)
        if self._own.place is None:
            self._own.find(last, self._n)
        is_predicted = self._prediction.check(token_id)
        if self._prediction.place is None:
            self._prediction.find(last)
        return is_predicted

    @property
    def _best(self) -> Source:
        """The text that is most likely right about the next token."""
        texts = (self._prediction, self._own)
        return max(texts, key=lambda text: (text.place is not None, text.hit_rate))

    @property
    def hit_rate(self) -> float:
        """How likely a draft's token is right if those before it are; 0 without a draft."""
        return 0.0 if self._best.place is None else self._best.hit_rate

    def draft(self, n_tokens: int) -> list[int]:
        """Return the next tokens, at most so many. One's own text is repeated from its end on."""
        source = self._best
        if source.place is None or not n_tokens:
            return []
        places = source.place + np.arange(n_tokens)
        if source is self._own:
            places = source.place + np.arange(n_tokens) % (self._n - source.place)
        drafted: list[int] = source.token_ids[places[places < len(source.token_ids)]].tolist()
        return drafted


def draft_lengths(hit_rates: list[float], rooms: list[int], *, in_one_run: bool) -> list[int]:
    """Return the draft length, at most its room, of each sequence of a step.

    They yield most tokens per second (Leviathan et al. 2023, 3.3): the likeliest token joins while
    it exceeds its share of the run, tokens / time, which then rises. Sequences without a draft gain
    nothing, and lose little. in_one_run: drafts join the run of the step; else each takes a run of
    its own, which pays only for a lone sequence.
    """
    n = len(rooms)
    lengths, n_tokens, time = [0] * n, float(n), _EMPTY_RUN + n
    all_gain = all(rate * time > n_tokens for rate in hit_rates)
    most = MAX_DRAFTED if all_gain else int(_MOST_LONGER * time)
    queue = [(-rate, i) for i, rate in enumerate(hit_rates) if rooms[i] > 0]
    heapify(queue)
    while queue and sum(lengths) < most and (in_one_run or n == 1):
        chance, i = -queue[0][0], queue[0][1]
        if chance * time <= n_tokens:
            break
        lengths[i] += 1
        n_tokens, time = n_tokens + chance, time + 1
        if lengths[i] < min(_MAX_DRAFT, rooms[i]):
            heapreplace(queue, (-chance * hit_rates[i], i))
        else:
            heappop(queue)
    return lengths
