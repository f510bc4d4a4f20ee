"""The prompt tokens that fit into a step beside running streams, from the times of the last steps.

Sarathi-Serve (OSDI '24) profiles a machine to find the token budget of a latency target; here the
steps are the profile. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_TARGET_DECODES = 3  # decode runs in a step, unless a target is set
_FILLED = 0.9  # share of the target to fill, because times vary by a tenth
_N_DECODES = 9  # the last decode runs; their median follows the batch and ignores a hiccup
_GAIN = 0.25  # share of an error by which one step corrects the estimate
_LEAST_TOKENS = 32
_LEAST_OF_CHUNK = (1 / 2, 1 / 8)  # fewest tokens without and with a target; at least _LEAST_TOKENS
_MULTIPLE = 16  # budgets are multiples, so runs have few shapes


class TokenBudget:
    """An estimate of the seconds of a prompt token, and the number of them that a target allows.

    target: seconds between two tokens of a stream; None is three decode runs, 0 is no limit.
    """

    def __init__(self, chunk_size: int, target: float | None) -> None:
        self.chunk_size = chunk_size
        self.target = target
        self._decodes: deque[float] = deque(maxlen=_N_DECODES)
        # Seconds of a prompt token: at the beginning, and in addition for each 1024 tokens before.
        self._first, self._later = 0.0, 0.0

    def beside_streams(self, past: int) -> int:
        """Return the most prompt tokens of a step; past: tokens of the first prompt before them.

        Prompts have to end, and each run reads all weights. So the least is half of chunk_size, or
        an eighth where a target puts latency before throughput.
        """
        seconds = self._first + self._later * past / 1024
        if self.target == 0 or not self._decodes or not seconds:
            return self.chunk_size
        decode = median(self._decodes)
        target = _TARGET_DECODES * decode if self.target is None else self.target
        n_tokens = int((_FILLED * target - decode) / seconds)
        least = int(self.chunk_size * _LEAST_OF_CHUNK[self.target is not None])
        return min(self.chunk_size, max(_LEAST_TOKENS, least, n_tokens - n_tokens % _MULTIPLE))

    def record(
        self, seconds: float, n_decode: int, decode_seconds: float, prompts: list[tuple[int, int]]
    ) -> None:
        """Record a step of `n_decode` sequences and some prompts.

        decode_seconds: 0 if decodes did not run alone. prompts: tokens of each chunk and before it.
        """
        if decode_seconds:
            self._decodes.append(decode_seconds)
        elif n_decode and self._decodes:
            decode_seconds = median(self._decodes)
        n_tokens = sum(count for count, _ in prompts)
        if not n_tokens:
            return
        past = sum(count * before for count, before in prompts) / n_tokens / 1024
        found = max(0.0, seconds - decode_seconds) / n_tokens
        expected = self._first + self._later * past
        # A normalised least-mean-squares filter; a hiccup counts as twice the expected time.
        error = min(found, 2 * expected or found) - expected
        correction = (_GAIN if expected else 1.0) * error / (1 + past**2)
        self._first = max(0.0, self._first + correction)
        self._later = max(0.0, self._later + correction * past)
