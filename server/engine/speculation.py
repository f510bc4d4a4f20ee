"""Prompt-lookup speculation: guess the next tokens from the sequence's own text, and check all guesses in one run.

A draft is what followed the last tokens where they stood before (Saxena 2023, "Prompt Lookup Decoding"), checked as in
speculative sampling (Leviathan et al. 2023; Chen et al. 2023). Nothing here knows rows, runs or other sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.engine.sampling import Floats, sample

if TYPE_CHECKING:
    from server.engine.sequence import Sequence

# Tokens that have to match. On the text of this repository the first guess after one token is right 26 times in 100,
# which is less than checking costs; after two 46, after three 53.
NGRAM_SIZES = (3, 2)
_SECOND_TOKEN = 0.3  # of the time of a run of one token, where it has two: products leave the kernels for one row
_NEXT_TOKEN = 0.05  # the same for each after it (int8, 135M parameters, 2 processors: 24 ms, 32 for two, 39 for nine)
_OPTIMISM = 0.9  # hit rate of a sequence that was not tried for long: high enough for a try beside three others
_HALF_LIFE = 128  # tokens in which half of what is known about the hit rate is forgotten
_WEIGHT = 0.25  # of the newest guess in the hit rate


def verify(logits: Floats, sequence: Sequence, draft: list[int]) -> list[int | None]:
    """The tokens that a step yields, 1 to n_draft + 1, for the caller to append; the last may be None, as in `sample`.

    logits: [n_draft + 1, vocab]; row i follows the sequence's tokens and the first i of the draft. Each row is sampled
    as ever, after the tokens before it, until one is not what was guessed, so tokens and random draws are those of one
    step a token. That is rejection sampling with a point mass q for the draft's distribution: a guess is kept with
    probability p(guess) = min(1, p / q), and what replaces it follows max(0, p - q): p without the guess, renormalised.
    """
    tokens: list[int | None] = []
    n_output = len(sequence.output_ids)
    for row, guess in zip(logits, (*draft, None), strict=True):
        token = sample(row[None], [sequence])[0]
        tokens.append(token)
        is_last = (
            token in sequence.ending_ids or n_output + len(tokens) >= sequence.params.max_tokens
        )
        if token is None or token != guess or is_last:
            break
        sequence.output_ids.append(token)  # the next row's penalties see it
    del sequence.output_ids[n_output:]
    return tokens


class PromptLookup:
    """Where each n-gram of one sequence was last followed by a token."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0  # tokens whose n-grams are known

    def propose(self, token_ids: list[int], n_draft: int) -> list[int]:
        """What followed the latest earlier place of the longest n-gram that ends `token_ids`; empty where none did.

        A continuation that runs into the end is taken for a loop, and goes round. token_ids: those of the last call,
        and new ones after them; each is indexed once, in constant time.
        """
        n = len(token_ids)
        for end in range(self._n_indexed + 1, n):  # not the last token: nothing follows it yet
            for size in NGRAM_SIZES:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._n_indexed = n - 1
        for size in NGRAM_SIZES:
            end = self._ends.get(tuple(token_ids[-size:]), n)
            if end < n:
                return [token_ids[end + i % (n - end)] for i in range(n_draft)]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPolicy:
    """How long drafts are. max_speculating: sequences running at once, above which there are none."""

    max_speculating: int = 4
    max_draft: int = 8

    @property
    def max_step(self) -> int:
        """Guesses in one step, of all sequences together."""
        return self.max_speculating * self.max_draft

    def n_draft(self, hit_rate: float, n_running: int, room: int) -> int:
        """The number of guesses, at most `room`, that yields most tokens for the time (Leviathan et al. 2023, 3.3).

        hit_rate: of a guess whose predecessors were right. Beside n_running - 1 sequences that decode in one run, the
        draft takes a run of its own: n + h + h² + … tokens in run(n - 1) + run(n_draft + 1), against n in run(n).
        """
        best, best_speed = 0, n_running / _run_cost(n_running)
        n_tokens, all_hit = float(n_running), 1.0
        longest = min(self.max_draft, room) if n_running <= self.max_speculating else 0
        for length in range(1, longest + 1):
            all_hit *= hit_rate
            n_tokens += all_hit
            speed = n_tokens / (_run_cost(n_running - 1) + _run_cost(length + 1))
            if speed > best_speed:
                best, best_speed = length, speed
        return best


class Speculation:
    """One sequence's drafts, and how often they were right of late.

    Where they are wrong they pause, and are tried again as that is forgotten: the later, the more others run.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._lookup = PromptLookup()
        self._hit_rate = _OPTIMISM  # when the sequence had _n_tokens
        self._n_tokens = 0

    def draft(self, sequence: Sequence, n_running: int) -> list[int]:
        """Guesses to check in this step, in which `n_running` sequences run; empty where it is not worth it."""
        room = (
            sequence.n_reserved - sequence.n_tokens - 1
        )  # one more token follows; the engine keeps to max_model_len
        n_draft = self._policy.n_draft(self._expected(sequence.n_tokens), n_running, room)
        return self._lookup.propose(sequence.token_ids, n_draft) if n_draft else []

    def record(self, sequence: Sequence, draft: list[int], tokens: list[int | None]) -> None:
        """Note what `verify` made of a draft."""
        hit_rate = self._expected(sequence.n_tokens)
        for guess, token in zip(draft, tokens, strict=False):
            hit_rate += _WEIGHT * ((guess == token) - hit_rate)
        self._hit_rate, self._n_tokens = hit_rate, sequence.n_tokens

    def _expected(self, n_tokens: int) -> float:
        forgotten = 1.0 - math.exp2(-(n_tokens - self._n_tokens) / _HALF_LIFE)
        return self._hit_rate + forgotten * (_OPTIMISM - self._hit_rate)


def _run_cost(n_tokens: int) -> float:
    """Time of a run, in runs of one token; how many sequences they belong to hardly matters."""
    return float(n_tokens) if n_tokens < 2 else 1.0 + _SECOND_TOKEN + _NEXT_TOKEN * (n_tokens - 2)
