"""The prompt tokens that fit into a step, from the times of the last steps.

Sarathi-Serve (OSDI '24) profiles a machine to find how many tokens keep to a latency target; here
the steps are the profile. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_TARGET_RUNS = 4  # runs without prompts in a step beside streams, unless a target is set
_FILLED = 0.9  # share of the target to fill, because times vary by a tenth
_ALONE = 2  # whole chunks at no depth, which a step without streams may take at any depth
_N_DECODES = 9  # the last decode runs; their median follows the batch and ignores a hiccup
_STALE = 32  # steps after which the time of decodes is measured again
_NOISE = 0.1  # share by which a step's time is wrong by chance
_HICCUP = 1.25  # most by which a step's time and the expected one differ, in its correction
_SPEED = 0.05  # share by which all parts of the cost change together from step to step
_DRIFT = 0.005  # share of a chunk's time by which each changes apart from the others
COPIED_PER_COMPUTED = 16  # tokens copied in the time of running one; 20 to 60 were measured
_RUN = 0.25  # weight of the constant part: 1/17 of a full chunk's first time is taken for it
# Of a prompt's chunk, because prompts have to end, and smaller chunks cost more for each token.
_LEAST_TOKENS = 8
_LEAST, _LEAST_ALONE = 32, 4  # parts of chunk_size, beside streams and without
_MULTIPLE = 4  # parts of prompts are multiples, so runs have fewer shapes
_DEPTH = 1024  # tokens before a chunk, in the unit of PromptCost.later


class PromptCost(NamedTuple):
    """Seconds of a chunk of chunk_size tokens: first, and later for each 1,024 tokens before it."""

    chunk_size: int
    run: float = 0.0  # in units of _RUN, the part of a run that no token adds to
    first: float = 0.0
    later: float = 0.0

    @property
    def slowdown(self) -> float:
        """The share by which each token before a prompt's token slows it."""
        return self.later / self.first / _DEPTH if self.first else 0.0

    def chunk(self, count: int, past: float) -> float:
        """Return the seconds of a chunk of `count` tokens after `past`, without its run's."""
        return count / self.chunk_size * (self.first + self.later * past / _DEPTH)

    def prompt(self, count: NDArray[np.int64], past: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of the last `count` tokens of prompts, cut into whole chunks."""
        depth = past + np.maximum(0, count - self.chunk_size) / 2
        token = self.first + self.later * depth / _DEPTH + _RUN * self.run
        seconds: NDArray[np.float64] = count / self.chunk_size * token
        return seconds


@dataclass(slots=True)
class StepRoom:
    """The tokens and the seconds, by their cost, that a step has left for prompts.

    least: tokens of its first chunk, whatever they cost.
    """

    cost: PromptCost
    tokens: int
    seconds: float
    least: int

    def limit(self, past: int, n_left: int, *, is_first: bool) -> int:
        """Return the most tokens of a chunk after `past`; the first has at least `least`.

        n_left: of its prompt. A part of a prompt is a multiple of _MULTIPLE.
        """
        if self.seconds == math.inf:
            return self.tokens
        fitting = int(max(0.0, self.seconds) / self.cost.chunk(1, past))
        if fitting < n_left:
            fitting -= fitting % _MULTIPLE
        return min(self.tokens, max(fitting, self.least if is_first else 0))

    def take(self, count: int, past: int, share: int) -> None:
        """Subtract a chunk; share: its tokens, and those that its other work counts as."""
        self.tokens -= share
        self.seconds -= self.cost.chunk(count, past) + self.cost.chunk(share - count, 0)


class StepCapacity:
    """The seconds that a step may spend on prompts, and the number of tokens that fit into them.

    target: seconds between two tokens of a stream; None is four runs without prompts, 0 any time.
    cost: as measured so far; nothing costs anything before the first prompt.
    """

    def __init__(self, chunk_size: int, target: float | None) -> None:
        self.chunk_size = chunk_size
        self.target = target
        self.cost = PromptCost(chunk_size)
        self._decodes: deque[float] = deque(maxlen=_N_DECODES)
        self._n_mixed = 0  # steps with streams since decodes ran alone
        self._covariance: NDArray[np.float64] = np.zeros((3, 3))  # of the cost's parts
        self._is_one_run = False  # prompts join the run of decodes

    @property
    def is_stale(self) -> bool:
        """True if the next step should run decodes alone: on a GPU only such a step times them."""
        return self.target != 0 and self._n_mixed >= (_STALE if self._decodes else 1)

    def room(self, *, has_streams: bool) -> StepRoom:
        """Return the room for prompts in the next step.

        Beside streams the step keeps to the target. Without, whoever comes next waits no longer
        than two whole chunks without a past take, or a quarter of one at great depth.
        """
        seconds = self._seconds(has_streams=has_streams)
        least = max(_LEAST_TOKENS, self.chunk_size // (_LEAST if has_streams else _LEAST_ALONE))
        return StepRoom(self.cost, self.chunk_size, seconds, least)

    def _seconds(self, *, has_streams: bool) -> float:
        if self.target == 0 or not self.cost.first:
            return math.inf
        seconds = _ALONE * self.cost.first
        if not has_streams or not self._decodes:
            return seconds
        decode = median(self._decodes)
        run = 0.0 if self._is_one_run else _RUN * self.cost.run
        target = _TARGET_RUNS * (decode + run) if self.target is None else self.target
        return min(seconds, _FILLED * target - decode - run)

    def record(
        self, seconds: float, n_decode: int, decode_seconds: float, prompts: list[tuple[int, int]]
    ) -> None:
        """Record a step of `n_decode` sequences and some prompts.

        decode_seconds: 0 if decodes did not run alone. prompts: tokens of each chunk and before it.
        """
        joined = bool(n_decode and not decode_seconds)
        if decode_seconds:
            if self.is_stale:
                self._decodes.clear()
            self._decodes.append(decode_seconds)
            self._n_mixed = 0
        elif joined:
            self._is_one_run = True
            self._n_mixed += 1
            decode_seconds = median(self._decodes) if self._decodes else 0.0
        if not prompts:
            return
        # What prompts take time for: a run, their tokens, and the tokens before those.
        chunks = [count / self.chunk_size for count, _ in prompts]
        before = sum(n * past for n, (_, past) in zip(chunks, prompts, strict=True)) / _DEPTH
        parts = 0.0 if joined and decode_seconds else _RUN, sum(chunks), before
        self._correct(parts, max(0.0, seconds - decode_seconds))

    def _correct(self, parts: tuple[float, float, float], measured: float) -> None:
        """Correct the cost by a step's seconds: a Kalman filter whose state drifts.

        It knows which parts earlier steps have told apart, so a chunk at a depth that is new
        corrects what depth costs, and tiny prompts correct the run. Mostly all parts change alike,
        as the machine's speed does.
        """
        x, state = np.array(parts), np.array(self.cost[1:])
        least = np.array([0.0, state[1] / 2, 0.0])
        expected = float(x @ state)
        if not expected:
            state = x * measured / (x @ x)
            self._covariance = np.eye(3) * state[1] ** 2
        else:
            self._covariance += np.outer(state, state) * _SPEED**2
            self._covariance += np.eye(3) * (_DRIFT * state[1]) ** 2
            gain = self._covariance @ x
            gain /= x @ gain + (_NOISE * expected) ** 2
            ratio = min(max(measured / expected, 1 / _HICCUP), _HICCUP)
            state += gain * (ratio - 1) * expected
            self._covariance -= np.outer(gain, x @ self._covariance)
        self.cost = PromptCost(self.chunk_size, *state.clip(least).tolist())
