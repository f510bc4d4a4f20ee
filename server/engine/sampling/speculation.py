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

MAX_DRAFTED = 32  # tokens of all drafts of a step
_MAX_DRAFT = 8  # tokens
_NGRAMS = (3, 2)  # numbers of last tokens that are looked up
_NEWEST_WEIGHT = 0.25  # of the newest token in the hit rate
_PREDICTED_HIT_RATE = 0.5  # of a prediction, until it shows its own
# Time of a run without its tokens, in times of one token: operators of our own on AVX2, on which a
# further token costs most (135M parameters in int8; 3.8 after 128 tokens, 3.0 after 1,900).
_EMPTY_RUN = 3.0
_MOST_LONGER = 0.25  # share of its time by which drafts lengthen a step in which some have none


class Source:
    """A text that may tell how a sequence goes on; a character stands for a token.

    Strings are searched several times as fast as arrays. place: of the token that comes next; None
    while the text tells nothing. hit_rate: a moving share of the tokens that it told right.
    """

    def __init__(self, token_ids: Tokens[int], place: int | None, hit_rate: float) -> None:
        self.text = "".join(map(chr, token_ids))
        self.place = place
        self.hit_rate = hit_rate
        self.error = 0  # the last place where it was wrong

    def check(self, token: str) -> bool:
        """Return whether the sequence's next token is the one in `place`, and step over it."""
        if self.place is None:
            return False
        is_hit = self.text[self.place] == token
        self.hit_rate += _NEWEST_WEIGHT * (is_hit - self.hit_rate)
        self.error = self.place
        self.place = self.place + 1 if is_hit and self.place + 1 < len(self.text) else None
        return is_hit

    def find(self, last: str, since: int) -> None:
        """Unless the place is known, go to one after a sequence's last tokens: three, else two.

        It is the first place after `since`, else the last.
        """
        for n in _NGRAMS if self.place is None else ():
            if n <= len(last):
                start, end = max(0, since - n + 1), len(self.text) - 1  # a token follows
                found = self.text.find(last[-n:], start, end)
                found = self.text.rfind(last[-n:], 0, end) if found < 0 else found
                if found >= 0:
                    self.place = found + n
                    return


class Speculation:
    """The two texts that a sequence's drafts come from: its own so far, and a prediction."""

    def __init__(self, given_ids: Tokens[int], prediction: Tokens[int] = ()) -> None:
        self._own = Source(given_ids, None, 0.0)
        self._prediction = Source(prediction, 0 if prediction else None, _PREDICTED_HIT_RATE)

    def add(self, token_id: int) -> bool:
        """Append a new token; return whether the prediction had it in its place."""
        own, prediction, token = self._own, self._prediction, chr(token_id)
        own.text += token
        last = own.text[-_NGRAMS[0] :]
        own.check(token)
        own.find(last, len(own.text))
        is_predicted = prediction.check(token)
        prediction.find(last, prediction.error)
        return is_predicted

    @property
    def _best(self) -> Source:
        """The text that is most likely right about the next token."""
        texts = (self._prediction, self._own)
        return max(texts, key=lambda text: (text.place is not None, text.hit_rate))

    @property
    def hit_rate(self) -> float:
        """The chance that a draft's token is right if those before it are; 0 without a draft."""
        return 0.0 if self._best.place is None else self._best.hit_rate

    def draft(self, n_tokens: int) -> list[int]:
        """Return the next tokens, at most so many. One's own text is repeated from its end on."""
        source = self._best
        if source.place is None:
            return []
        told = source.text[source.place :]
        if source is self._own:
            told = told[:n_tokens] * n_tokens
        return list(map(ord, told[:n_tokens]))


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
