"""How long a newcomer would have to wait, from what the engine's last steps took.

Nothing here reads a clock or asks the engine. Where nothing has been measured, nothing takes any time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

from server.engine.engine import StepStats

OPTIMISM = 0.75  # part of what was measured that is expected: the load may ease, and who would make it has to be let in
_STEPS = 64  # the last ones, from which a step's time is known
_FULL_STEPS = 16  # of those that ran as many prompt tokens as they may
_ENDS = 64  # of sequences, from which it is known how long one holds a row
_COPIES = 16  # cached tokens that take as much of a step as one that is computed


class Work(NamedTuple):
    """What a sequence still needs, in tokens: of its prompt, and new ones at most.

    n_sure: new ones that it needs however its text may end. held: seconds since it got its row. left: seconds until its
    deadline.
    """

    n_prompt: int
    n_new: int
    n_sure: int = 0
    held: float = 0.0
    left: float = math.inf


@dataclass(frozen=True, slots=True)
class Backlog:
    """What stands before a newcomer: who holds one of `n_rows`, and who waits with an earlier turn.

    n_waiting_tokens: prompt tokens of all that wait, each prompt once.
    """

    n_rows: int
    running: list[Work]
    waiting: list[Work]
    n_waiting_tokens: int


class Forecast:
    """Rates of the engine, and what follows from them.

    A sequence is expected to hold its row as long as the last ones did, but no shorter than its sure tokens take, and
    no longer than all of them. Prompts are expected to run as fast as in the best of the last steps that were full of
    them. What something takes at least is a part of what is expected, with no prompts beside it.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds a token of one sequence
        self._bare_steps: deque[float] = deque(maxlen=_STEPS)  # those of them that ran no prompts
        self._full_steps: deque[float] = deque(maxlen=_FULL_STEPS)  # seconds a prompt token
        self._ends: deque[float] = deque(maxlen=_ENDS)  # seconds in a row
        self._seconds_a_token = 0.0
        self._least_seconds_a_token = 0.0
        self._seconds_a_prompt_token = 0.0
        self.seconds_held = 0.0  # how long a sequence holds its row, as a mean

    def step(self, stats: StepStats, chunk_size: int) -> None:
        """`chunk_size`: prompt tokens that fill a step."""
        if stats.n_decode:
            seconds = stats.seconds * stats.n_decode / (stats.n_decode + stats.n_accepted)
            self._steps.append(seconds)
            if not stats.n_prefill_tokens:
                self._bare_steps.append(seconds)
            self._seconds_a_token = _mean(self._steps)
            self._least_seconds_a_token = min(
                map(_mean, filter(None, (self._steps, self._bare_steps)))
            )
        if stats.n_prefill_tokens + stats.n_cached / _COPIES >= 0.9 * chunk_size:
            self._full_steps.append(stats.seconds / (stats.n_prefill_tokens + stats.n_cached))
            self._seconds_a_prompt_token = min(self._full_steps)

    def ended(self, held: float) -> None:
        self._ends.append(held)
        self.seconds_held = _mean(self._ends)

    def seconds_to_run(self, work: Work) -> float:
        """What the tokens take in a row of their own."""
        return work.n_prompt * self._seconds_a_prompt_token + work.n_new * self._seconds_a_token

    def least_seconds_to_run(self, n_prompt: int, n_new: int) -> float:
        seconds = n_prompt * self._seconds_a_prompt_token + n_new * self._least_seconds_a_token
        return OPTIMISM * seconds

    def seconds_to_row(self, backlog: Backlog) -> float:
        """At least, until a newcomer begins; those who wait do in turn, each when a row is free and the prompts before
        it are read, if it is then still in time.
        """
        n_free = backlog.n_rows - len(backlog.running)
        free_at = [0.0] * n_free + [self._seconds_in_row(work) for work in backlog.running]
        heapify(free_at)
        read_at = self.least_seconds_to_run(sum(work.n_prompt for work in backlog.running), 0)
        for work in backlog.waiting:
            begin = max(free_at[0], read_at)
            if begin + self.least_seconds_to_run(work.n_prompt, work.n_new) <= work.left:
                heapreplace(free_at, begin + self._seconds_in_row(work))
                read_at = begin + self.least_seconds_to_run(work.n_prompt, 0)
        return max(free_at[0], read_at)

    def _seconds_in_row(self, work: Work) -> float:
        usual = OPTIMISM * self.seconds_held - work.held
        sure = self.least_seconds_to_run(work.n_prompt, work.n_sure)
        return min(
            max(usual, sure), self.least_seconds_to_run(work.n_prompt, work.n_new), work.left
        )


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0
