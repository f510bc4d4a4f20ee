"""What is forecast against what happens, in an engine whose steps take exactly as long as their tokens."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from server.engine.engine import StepStats
from server.errors import OverloadedError
from server.requests.admission import patience
from server.requests.forecast import OPTIMISM, Backlog, Forecast, Work

N_ROWS, CHUNK = 4, 64


@dataclass(eq=False)
class Request:
    arrived: float
    n_prompt: int
    n_new: int  # it gets exactly as many
    deadline: float
    is_sure: bool = False  # how many new ones it gets
    could: bool = False  # have been in time, had nobody come after it
    latest: float = math.inf  # when it gives up waiting
    scheduled: float | None = None
    n_read: int = 0
    n_got: int = 0

    def work(self, now: float) -> Work:
        held = 0.0 if self.scheduled is None else now - self.scheduled
        n_new = self.n_new - self.n_got
        return Work(
            self.n_prompt - self.n_read, n_new, n_new * self.is_sure, held, self.deadline - now
        )

    @property
    def is_read(self) -> bool:
        return self.n_read == self.n_prompt


@dataclass
class Simulation:
    """First come, first served, with chunked prompts: a step takes `base`, and `each` for every prompt token."""

    base: float
    each: float
    now: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    forecast: Forecast = field(default_factory=Forecast)
    ends: Counter[str] = field(default_factory=Counter)

    def backlog(self) -> Backlog:
        running, waiting = (
            [request.work(self.now) for request in some] for some in (self.running, self.waiting)
        )
        return Backlog(N_ROWS, running, waiting, sum(request.n_prompt for request in self.waiting))

    def admit(self, request: Request) -> bool:
        """Whether the door lets it in; if so it waits."""
        work = request.work(self.now)
        try:
            request.latest = self.now + patience(self.forecast, self.backlog(), work)
        except OverloadedError:
            self.ends["refused"] += 1
            return False
        self.waiting.append(request)
        return True

    def step(self) -> None:
        """One step, and what a deadline does to those whose time is over, or too short for what they need."""
        for request in list(self.waiting):
            if self.now > request.latest:
                self.waiting.remove(request)
                self.ends["shed"] += 1
                self.ends["wrongly shed"] += request.could
        decoding = [request for request in self.running if request.is_read]
        n_prefill = self._read()
        seconds = self.base + self.each * n_prefill
        self.now += seconds
        for request in decoding:
            request.n_got += 1
        stats = StepStats(len(decoding), n_prefill, 0, 0, 0, 0, seconds)
        self.forecast.step(stats, CHUNK)
        for request in list(self.running):
            is_late = self.now > request.deadline
            if is_late or request.n_got == request.n_new:
                self.running.remove(request)
                self.ends["late" if is_late else "good"] += 1
                assert request.scheduled is not None
                self.forecast.ended(self.now - request.scheduled)

    def _read(self) -> int:
        room = CHUNK
        while room:
            reading = next((request for request in self.running if not request.is_read), None)
            if reading is None:
                if not self.waiting or len(self.running) == N_ROWS:
                    break
                reading = self.waiting.pop(0)
                reading.scheduled = self.now
                self.running.append(reading)
            n = min(room, reading.n_prompt - reading.n_read)
            reading.n_read += n
            room -= n
        return CHUNK - room

    def run_until(self, moment: float) -> None:
        while self.now < moment and (self.waiting or self.running):
            self.step()
        self.now = max(self.now, moment)


def could_have_made_it(simulation: Simulation, request: Request) -> bool:
    """The oracle: admit it after all, and nobody after it; all before it are served."""
    other, wanted = copy.deepcopy((simulation, request))
    other.waiting.append(wanted)
    for one in (*other.waiting, *other.running):
        one.deadline = one.latest = math.inf
    while wanted.n_got < wanted.n_new:
        other.step()
    return other.now <= request.deadline


def arrivals(
    chance: random.Random, load: float, kind: str, simulation: Simulation, n: int
) -> list[Request]:
    """Poisson arrivals at `load` times what the engine can take."""
    now, requests = 0.0, []
    for _ in range(n):
        n_prompt, n_new = {
            "even": (16, 20),
            "long": (300, 4),
            "mixed": chance.choice([(8, 4), (60, 60)]),
        }[kind]
        seconds = max(
            n_new * simulation.base / N_ROWS, n_prompt * (simulation.each + simulation.base / CHUNK)
        )
        now += chance.expovariate(1) * seconds / load
        requests.append(Request(now, n_prompt, n_new, 0.0))
    return requests


def play(
    seed: int,
    load: float,
    kind: str,
    slack: float,
    *,
    each: float,
    is_sure: bool = False,
    check: bool = False,
) -> Simulation:
    """`slack`: deadlines, in multiples of what a request takes alone."""
    chance = random.Random(seed)
    simulation = Simulation(base=0.01, each=each)
    for request in arrivals(chance, load, kind, simulation, int(150 * max(1.0, load))):
        alone = (
            request.n_new + -(-request.n_prompt // CHUNK)
        ) * simulation.base + request.n_prompt * simulation.each
        request.deadline, request.is_sure = request.arrived + slack * alone, is_sure
        simulation.run_until(request.arrived)
        request.could = check and could_have_made_it(simulation, request)
        if not simulation.admit(request):
            simulation.ends["wrongly refused"] += request.could
    return simulation


@pytest.mark.parametrize("kind", ["even", "long", "mixed"])
@pytest.mark.parametrize(
    ("each", "is_sure", "spared"),
    [(0.0, True, 0.0), (0.0002, False, 0.1), (0.0002, True, 0.1), (0.002, False, 0.5)],
)
def test_whoever_is_refused_could_not_have_made_it(
    kind: str, each: float, is_sure: bool, spared: float
) -> None:
    """Where steps all take the same time, and where they are as long as what they run.

    `spared`: how many of those that give up waiting could still have, for those whose steps hold many prompts.
    """
    ends = play(1, 2.0, kind, 4.0, each=each, is_sure=is_sure, check=True).ends
    assert ends["refused"] > 40
    assert ends["wrongly refused"] == 0
    assert ends["wrongly shed"] <= spared * ends["shed"]


@pytest.mark.parametrize("kind", ["even", "long", "mixed"])
@pytest.mark.parametrize("slack", [2.5, 6.0])
def test_as_many_make_it_under_overload_as_ever(kind: str, slack: float) -> None:
    """Most of the others are refused at once; none of them takes a row from one that is in time."""
    played = [play(1, load, kind, slack, each=0.0002) for load in (1.0, 2.0, 10.0)]
    rates = [simulation.ends["good"] / simulation.now for simulation in played]
    assert rates[-1] >= 0.9 * max(rates)
    assert played[-1].ends["refused"] > 2 * played[-1].ends["shed"]


def test_a_newcomer_is_measured_by_those_before_it() -> None:
    """Of all times three quarters are believed."""
    forecast = Forecast()
    forecast.step(
        StepStats(2, 64, 0, 0, 0, 0, 1.0), CHUNK
    )  # a second a token; 64 prompt tokens a second
    forecast.step(StepStats(2, 10, 0, 0, 0, 0, 1.0), CHUNK)  # not full: says nothing of prompts
    forecast.ended(40.0)
    own = Work(64, 3)
    assert forecast.seconds_to_run(own) == 1.0 + 3.0
    taken = [Work(0, 100, held=24.0), Work(0, 12)]  # 30 - 24 seconds, and 9
    assert forecast.least_seconds_to_run(64, 3) == 3.0
    assert forecast.seconds_to_row(Backlog(3, taken, [], 0)) == 0.0
    assert forecast.seconds_to_row(Backlog(2, taken, [], 0)) == 6.0
    assert (
        forecast.seconds_to_row(Backlog(2, [taken[0]._replace(n_sure=11), taken[1]], [], 0)) == 8.25
    )
    assert forecast.seconds_to_row(Backlog(2, taken, [Work(0, 1)], 0)) == 6.75
    assert (
        forecast.seconds_to_row(Backlog(2, taken, [Work(0, 99, left=9.0)], 0)) == 6.0
    )  # it gives up
    assert forecast.seconds_to_row(Backlog(9, [Work(128, 1)], [Work(192, 1)], 0)) == 3.75
    forecast.step(StepStats(2, 0, 0, 0, 0, 0, 0.5), CHUNK)  # no prompts beside it
    assert forecast.least_seconds_to_run(64, 3) == OPTIMISM * (1.0 + 3 * 0.5)


def test_what_the_cache_has_and_guesses_that_are_right_save_time() -> None:
    cached, guessed = Forecast(), Forecast()
    cached.step(StepStats(0, 32, 1056, 1024, 0, 0, 0.5), CHUNK)
    guessed.step(StepStats(2, 0, 0, 0, 4, 2, 0.5), CHUNK)
    assert cached.seconds_to_run(Work(1056, 0)) == 0.5
    assert guessed.seconds_to_run(Work(0, 4)) == 1.0
