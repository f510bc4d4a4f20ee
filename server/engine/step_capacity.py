"""The prompt tokens that fit into a step beside running streams, from the times of the last steps.

Sarathi-Serve (OSDI '24) profiles a machine to find how many tokens keep to a latency target; here
the steps are the profile. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_TARGET_DECODES = 3  # decode runs in a step, unless a target is set
_FILLED = 0.9  # share of the target to fill, because times vary by a tenth
_N_DECODES = 9  # the last decode runs; their median follows the batch and ignores a hiccup
_STALE = 32  # steps after which the time of decodes is measured again
_GAIN = 0.25  # share of an error by which one step corrects the estimate
_RUN = 0.25  # weight of the constant part: 1/17 of a full chunk's first time is taken for it
_LEAST_TOKENS = 32
_LEAST_OF_CHUNK = (1 / 2, 1 / 8)  # fewest tokens without and with a target; at least _LEAST_TOKENS
_MULTIPLE = 16  # capacities are multiples, so runs have few shapes


class StepCapacity:
    """An estimate of the seconds of prompts, and the number of their tokens that a target allows.

    target: seconds between two tokens of a stream; None is three decode runs, 0 is no limit.
    """

    def __init__(self, chunk_size: int, target: float | None) -> None:
        self.chunk_size = chunk_size
        self.target = target
        self._decodes: deque[float] = deque(maxlen=_N_DECODES)
        self._n_mixed = 0  # steps with streams since decodes ran alone
        # Seconds of the parts of `_parts`.
        self._seconds = [0.0, 0.0, 0.0]

    @property
    def is_stale(self) -> bool:
        """True if the next step should run decodes alone: on a GPU only such a step times them."""
        return self.target != 0 and self._n_mixed >= (_STALE if self._decodes else 1)

    def beside_streams(self, past: int) -> int:
        """Return the most prompt tokens of a step; past: tokens of the first prompt before them.

        Prompts have to end, and each run reads all weights. So the least is half of chunk_size, or
        an eighth where a target puts latency before throughput.
        """
        run, first, later = self._seconds
        chunk = first + later * past / 1024
        if self.target == 0 or not self._decodes or not chunk:
            return self.chunk_size
        decode = median(self._decodes)
        target = _TARGET_DECODES * decode if self.target is None else self.target
        n_tokens = int((_FILLED * target - decode - _RUN * run) / chunk * self.chunk_size)
        least = int(self.chunk_size * _LEAST_OF_CHUNK[self.target is not None])
        return min(self.chunk_size, max(_LEAST_TOKENS, least, n_tokens - n_tokens % _MULTIPLE))

    def record(
        self, seconds: float, n_decode: int, decode_seconds: float, prompts: list[tuple[int, int]]
    ) -> None:
        """Record a step of `n_decode` sequences and some prompts.

        decode_seconds: 0 if decodes did not run alone. prompts: tokens of each chunk and before it.
        """
        if decode_seconds:
            if self.is_stale:
                self._decodes.clear()
            self._decodes.append(decode_seconds)
            self._n_mixed = 0
        elif n_decode:
            self._n_mixed += 1
            decode_seconds = median(self._decodes) if self._decodes else 0.0
        if not prompts:
            return
        parts = self._parts(prompts)
        expected = sum(x * s for x, s in zip(parts, self._seconds, strict=True))
        measured = max(0.0, seconds - decode_seconds)
        # A normalised least-mean-squares filter; a hiccup counts as twice the expected time.
        error = min(measured, 2 * expected or measured) - expected
        correction = (_GAIN if expected else 1.0) * error / sum(x * x for x in parts)
        self._seconds = [
            max(0.0, s + correction * x) for x, s in zip(parts, self._seconds, strict=True)
        ]

    def _parts(self, prompts: list[tuple[int, int]]) -> tuple[float, float, float]:
        """Return what prompts take time for: a run, their tokens, and the tokens before those.

        Tokens are counted in chunks, those before them in 1024 for each token of a chunk.
        """
        n_tokens = sum(count for count, _ in prompts) / self.chunk_size
        n_before = sum(count * before for count, before in prompts) / self.chunk_size / 1024
        return _RUN, n_tokens, n_before
