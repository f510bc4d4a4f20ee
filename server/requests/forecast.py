"""Estimates of how long a request waits for a slot, from the times of the engine's last steps.

Nothing here reads a clock or asks the engine. Where nothing was measured, nothing takes any time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from statistics import fmean
from typing import NamedTuple, Self

from server.engine.engine import StepStats

# Of what was measured. The load may ease, and a request that could then be in time is admitted.
LEAST_SHARE = 0.75
_STEPS = 64  # the last steps, which give the time of a new token
_FULL_STEPS = 16  # the last steps that ran as many prompt tokens as fit
_ENDS = 64  # the last sequences that ended, which give the time that one holds a slot
_COPIES = 16  # cached tokens that take as much of a step as one computed token


class Work(NamedTuple):
    """The tokens that a sequence still needs, and its times."""

    n_prompt: int
    n_new: int  # at most
    n_sure: int = 0  # new tokens that it needs however its text ends
    seconds_held: float = 0.0  # since it got its slot
    seconds_left: float = math.inf  # until its deadline
    queue_time: float = 0.0  # the moment that orders the queue


class Rates(NamedTuple):
    """Measured times, in seconds."""

    token: float = 0.0  # the mean of the last steps
    token_alone: float = 0.0  # with no prompts in the same step
    prompt_token: float = 0.0  # in the best of the last steps that were full of them
    slot: float = 0.0  # for which a sequence holds its slot, the mean

    def seconds_to_run(self, work: Work) -> float:
        """Estimate the seconds that a sequence takes once it has a slot."""
        return work.n_prompt * self.prompt_token + work.n_new * self.token

    def least_seconds_to_run(self, n_prompt: int, n_new: int) -> float:
        """Return a lower bound on the seconds that so many tokens take."""
        return LEAST_SHARE * (n_prompt * self.prompt_token + n_new * self.token_alone)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's work at one moment, and its measured rates."""

    rates: Rates = field(default_factory=Rates)
    n_slots: int = 1
    running: tuple[Work, ...] = ()  # sequences that hold a slot
    waiting: tuple[Work, ...] = ()  # the others, by arrival
    n_waiting_tokens: int = 0  # their prompts' tokens, once for all samples of a prompt

    def ahead_of(self, queue_time: float) -> Self:
        """Return the snapshot without the sequences that wait behind a queue time."""
        waiting = tuple(work for work in self.waiting if work.queue_time <= queue_time)
        return replace(self, waiting=waiting)

    def seconds_to_slot(self) -> float:
        """Return a lower bound on the seconds until a request behind all of this begins.

        Waiting sequences begin in turn, each when a slot is free and the prompts before it have
        been computed, if it can still meet its deadline then.
        """
        n_free = self.n_slots - len(self.running)
        free_at = [0.0] * n_free + [self._seconds_in_slot(work) for work in self.running]
        heapify(free_at)
        n_prompt = sum(work.n_prompt for work in self.running)
        computed_at = self.rates.least_seconds_to_run(n_prompt, 0)
        for work in self.waiting:
            begin = max(free_at[0], computed_at)
            least = self.rates.least_seconds_to_run(work.n_prompt, work.n_new)
            if begin + least <= work.seconds_left:
                heapreplace(free_at, begin + self._seconds_in_slot(work))
                computed_at = begin + self.rates.least_seconds_to_run(work.n_prompt, 0)
        return max(free_at[0], computed_at)

    def _seconds_in_slot(self, work: Work) -> float:
        """Return as long as the last ones held a slot, within the times of its tokens."""
        usual = LEAST_SHARE * self.rates.slot - work.seconds_held
        sure = self.rates.least_seconds_to_run(work.n_prompt, work.n_sure)
        longest = self.rates.least_seconds_to_run(work.n_prompt, work.n_new)
        return min(max(usual, sure), longest, work.seconds_left)


class Forecast:
    """A record of the last steps and ends, which gives the engine's rates."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds per token of one sequence
        self._bare_steps: deque[float] = deque(maxlen=_STEPS)  # those that ran no prompts
        self._full_steps: deque[float] = deque(maxlen=_FULL_STEPS)  # seconds per prompt token
        self._ends: deque[float] = deque(maxlen=_ENDS)  # seconds in a slot

    def step(self, stats: StepStats, chunk_size: int) -> None:
        """Record a step; `chunk_size` is the number of prompt tokens that fill one."""
        if stats.n_decode:
            seconds = stats.seconds * stats.n_decode / (stats.n_decode + stats.n_accepted)
            self._steps.append(seconds)
            if not stats.n_prefill_tokens:
                self._bare_steps.append(seconds)
        if stats.n_prefill_tokens + stats.n_cached / _COPIES >= 0.9 * chunk_size:
            self._full_steps.append(stats.seconds / (stats.n_prefill_tokens + stats.n_cached))

    def ended(self, seconds_held: float) -> None:
        """Record that a sequence has held its slot for so many seconds."""
        self._ends.append(seconds_held)

    @property
    def rates(self) -> Rates:
        """The rates of the recorded steps and ends."""
        steps = self._steps or (0.0,)
        token, token_alone = fmean(steps), fmean(self._bare_steps or steps)
        prompt_token, slot = min(self._full_steps, default=0.0), fmean(self._ends or (0.0,))
        return Rates(token, min(token, token_alone), prompt_token, slot)
