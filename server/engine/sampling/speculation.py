"""Prompt-lookup speculation: draft the next tokens from the sequence's own text.

A draft is what followed the last tokens at an earlier place (Saxena 2023, "Prompt Lookup
Decoding"). All its tokens are checked in one run, as in speculative sampling (Leviathan et al.
2023; Chen et al. 2023).
"""

from __future__ import annotations

import math

MAX_SPECULATING = 4  # running sequences above which there are no drafts
MAX_DRAFT = 8  # tokens
# Tokens that have to match. On this repository's text the first draft token after a match of one
# token is right 26 times in 100, less than checking costs; after two 46, after three 53.
NGRAM_SIZES = (3, 2)
# Additional time of a run of two tokens, and of each token after it, relative to a run of one,
# which has its own kernels (int8, 135M parameters, 2 CPUs: 24 ms, 32 for two, 39 for nine).
_SECOND_TOKEN = 0.3
_NEXT_TOKEN = 0.05
_UNTRIED_HIT_RATE = 0.9  # high enough for a try beside three other sequences
_HALF_LIFE = 128  # tokens in which half of the knowledge of the hit rate is forgotten
_NEWEST_WEIGHT = 0.25  # of the newest draft token in the hit rate


def best_draft_length(hit_rate: float, n_running: int, room: int) -> int:
    """Return the draft length, at most `room`, that yields most tokens per second.

    See Leviathan et al. 2023, 3.3. hit_rate: of a draft token whose predecessors were right. Beside
    n_running - 1 sequences that decode in one run, the draft takes a run of its own:
    n + h + h² + … tokens in run(n - 1) + run(length + 1), against n in run(n).
    """
    best, best_speed = 0, n_running / _run_cost(n_running)
    n_tokens, all_hit = float(n_running), 1.0
    longest = min(MAX_DRAFT, room) if n_running <= MAX_SPECULATING else 0
    for length in range(1, longest + 1):
        all_hit *= hit_rate
        n_tokens += all_hit
        speed = n_tokens / (_run_cost(n_running - 1) + _run_cost(length + 1))
        if speed > best_speed:
            best, best_speed = length, speed
    return best


class Speculation:
    """One sequence's drafts and their recent hit rate.

    Drafts pause while they are wrong, and are tried again as that is forgotten.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # the last place of each n-gram
        self._n_indexed = 0
        self._hit_rate = _UNTRIED_HIT_RATE  # when the sequence had _n_output new tokens
        self._n_output = 0

    def draft_length(self, n_output: int, n_running: int, room: int) -> int:
        """Return how many tokens of at most `room` to check beside other running sequences.

        n_output: new tokens of the sequence so far.
        """
        return best_draft_length(self._expected(n_output), n_running, room)

    def propose(self, token_ids: list[int], n_draft: int) -> list[int]:
        """Return what followed the longest n-gram that ends `token_ids` at its latest other place.

        A continuation that reaches the end is repeated. Empty if there is none. token_ids: those of
        the last call, followed by new ones.
        """
        n = len(token_ids)
        for end in range(self._n_indexed + 1, n):  # without the last token: nothing follows it yet
            for size in NGRAM_SIZES:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._n_indexed = n - 1
        for size in NGRAM_SIZES:
            end = self._ends.get(tuple(token_ids[-size:]), n)
            if end < n:
                return [token_ids[end + i % (n - end)] for i in range(n_draft)]
        return []

    def record(self, n_output: int, draft: list[int], tokens: list[int | None]) -> None:
        """Note which `tokens` a draft yielded after `n_output` new tokens."""
        hit_rate = self._expected(n_output)
        for drafted, token in zip(draft, tokens, strict=False):
            hit_rate += _NEWEST_WEIGHT * ((drafted == token) - hit_rate)
        self._hit_rate, self._n_output = hit_rate, n_output

    def _expected(self, n_output: int) -> float:
        forgotten = 1.0 - math.exp2((self._n_output - n_output) / _HALF_LIFE)
        return self._hit_rate + forgotten * (_UNTRIED_HIT_RATE - self._hit_rate)


def _run_cost(n_tokens: int) -> float:
    """Estimate the time of a run relative to one token; the number of sequences hardly matters."""
    return float(n_tokens) if n_tokens < 2 else 1.0 + _SECOND_TOKEN + _NEXT_TOKEN * (n_tokens - 2)
