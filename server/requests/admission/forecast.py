"""Estimates of how long a request waits for a slot, from the times of the engine's last steps.

Nothing here reads a clock or asks the engine. Where nothing was measured, nothing takes any time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from statistics import fmean
from typing import NamedTuple, Self

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.prompt_order import SECONDS_PER_WORK
from kvasir.server.engine.sequence import Sequence, SequenceStatus
from kvasir.server.engine.step_capacity import COPIED_PER_COMPUTED

# The share of a measured time to count on. The load may ease, and a request that could then be in
# time is admitted.
LEAST_SHARE = 0.75
_STEPS = 64  # the last steps, which give the time of a new token
_FULL_STEPS = 16  # the last steps that ran as many prompt tokens as fit
_ENDS = 64  # the last sequences that ended, which give the time that one holds a slot
_IN_SLOT = {SequenceStatus.PREFILLING, SequenceStatus.RUNNING}


class Work(NamedTuple):
    """The tokens that a sequence still needs, and its times."""

    n_prompt: int
    n_new: int  # at most
    n_certain: int = 0  # fewest new tokens, however its text ends
    seconds_held: float = 0.0  # since it got its slot
    seconds_left: float = math.inf  # until its deadline
    queue_time: float = 0.0  # the moment from which its age counts
    n_before: int = 0  # tokens of its prompt that are computed

    @classmethod
    def of(cls, sequence: Sequence, now: float) -> Work:
        """Return what a sequence still needs."""
        n_output, scheduled = len(sequence.output_ids), sequence.scheduled_at
        n_before = min(sequence.n_computed, len(sequence.prompt_ids))
        return cls(
            n_prompt=len(sequence.prompt_ids) - n_before,
            n_new=sequence.params.max_tokens - n_output,
            n_certain=max(0, sequence.n_certain - n_output),
            seconds_held=0.0 if scheduled is None else now - scheduled,
            seconds_left=sequence.deadline - now,
            queue_time=sequence.queue_key[0],
            n_before=n_before,
        )


class Forecast:
    """Seconds measured in the last steps and ends."""

    def __init__(self) -> None:
        self.token = 0.0  # the mean of the last steps
        self.token_alone = 0.0  # with no prompts in the same step
        self.prompt_token = 0.0  # with none before it, by the best of the last full steps
        self.slowdown = 0.0  # share by which each token before it slows a prompt's
        self.slot = 0.0  # for which a sequence holds its slot, the mean
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds per token of one sequence
        self._bare_steps: deque[float] = deque(maxlen=_STEPS)  # those that ran no prompts
        self._full_steps: deque[float] = deque(maxlen=_FULL_STEPS)  # seconds per prompt token
        self._ends: deque[float] = deque(maxlen=_ENDS)  # seconds in a slot

    def step(self, stats: StepStats) -> None:
        """Record a step."""
        if stats.n_decode:
            seconds = stats.seconds * stats.n_decode / (stats.n_decode + stats.n_accepted)
            self._steps.append(seconds)
            if not stats.n_prefill_tokens:
                self._bare_steps.append(seconds)
            self.token = fmean(self._steps)
            self.token_alone = min(self.token, fmean(self._bare_steps or self._steps))
        if (
            stats.n_prefill_tokens + stats.n_cached / COPIED_PER_COMPUTED
            >= 0.9 * stats.prefill_capacity
        ):
            n_tokens = stats.n_prefill_tokens * (1 + stats.slowdown * stats.n_before)
            self._full_steps.append(stats.seconds / (n_tokens + stats.n_cached))
            self.prompt_token, self.slowdown = min(self._full_steps), stats.slowdown

    def ended(self, seconds_held: float) -> None:
        """Record that a sequence has held its slot for so many seconds."""
        self._ends.append(seconds_held)
        self.slot = fmean(self._ends)

    def seconds_to_read(self, work: Work) -> float:
        """Estimate the seconds of a prompt's tokens, at their depth."""
        n_before = work.n_before + work.n_prompt / 2
        return work.n_prompt * self.prompt_token * (1 + self.slowdown * n_before)

    def seconds_to_run(self, work: Work) -> float:
        """Estimate the seconds that a sequence takes once it has a slot."""
        return self.seconds_to_read(work) + work.n_new * self.token

    def least_seconds_to_run(self, work: Work, n_new: int) -> float:
        """Return a lower bound on the seconds of a prompt and so many new tokens."""
        return LEAST_SHARE * (self.seconds_to_read(work) + n_new * self.token_alone)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's work at one moment, to be used before its next step is recorded."""

    rates: Forecast = field(default_factory=Forecast)
    n_slots: int = 1
    running: tuple[Work, ...] = ()  # sequences that hold a slot
    waiting: tuple[Work, ...] = ()  # the others, by arrival
    n_waiting_tokens: int = 0  # their prompts' tokens, once for all samples of a prompt

    @classmethod
    def of(cls, sequences: Iterable[Sequence], rates: Forecast, n_slots: int, now: float) -> Self:
        """Return that of clients' sequences, by arrival. One of several rows counts as often.

        The engine's thread keeps changing their states.
        """
        clients = (sequence for sequence in sequences if not sequence.is_background)
        statuses = [(sequence, sequence.status) for sequence in clients]
        waiting = [sequence for sequence, status in statuses if status is SequenceStatus.WAITING]
        held = [sequence for sequence, status in statuses if status in _IN_SLOT]
        running_works, waiting_works = (
            tuple(Work.of(each, now) for each in group for _ in range(each.params.n_rows))
            for group in (held, waiting)
        )
        # By identity: the samples of a prompt share it.
        prompts = {id(sequence.prompt_ids): sequence.prompt_ids for sequence in waiting}
        n_tokens = sum(map(len, prompts.values()))
        return cls(rates, n_slots, running_works, waiting_works, n_tokens)

    def ahead_of(self, work: Work) -> Self:
        """Return the snapshot without waiting sequences and prompts that come after a request's.

        See PromptOrder; the turns of owners are left out.
        """

        def due(work: Work) -> float:
            return work.queue_time + SECONDS_PER_WORK * self.rates.seconds_to_read(work)

        latest = due(work)
        return replace(
            self,
            running=tuple(w if due(w) <= latest else w._replace(n_prompt=0) for w in self.running),
            waiting=tuple(w for w in self.waiting if due(w) <= latest),
        )

    def seconds_to_slot(self) -> float:
        """Return a lower bound on the seconds until a request behind all of this begins.

        Waiting sequences begin in turn, each when a slot is free and the prompts before it have
        been computed, if it can still meet its deadline then.
        """
        least = self.rates.least_seconds_to_run
        free_at = [0.0] * (self.n_slots - len(self.running))
        free_at += [self._seconds_in_slot(work) for work in self.running]
        heapify(free_at)
        computed_at = sum(least(work, 0) for work in self.running)
        for work in self.waiting:
            begin = max(free_at[0], computed_at)
            if begin + least(work, work.n_new) <= work.seconds_left:
                heapreplace(free_at, begin + self._seconds_in_slot(work))
                computed_at = begin + least(work, 0)
        return max(free_at[0], computed_at)

    def _seconds_in_slot(self, work: Work) -> float:
        """Estimate its seconds in a slot: the recent mean, within what its tokens can take."""
        usual = LEAST_SHARE * self.rates.slot - work.seconds_held
        certain = self.rates.least_seconds_to_run(work, work.n_certain)
        longest = self.rates.least_seconds_to_run(work, work.n_new)
        return min(max(usual, certain), longest, work.seconds_left)
