"""Estimates against what happens, in an engine whose steps take exactly as long as their tokens."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence
from kvasir.server.errors import OverloadedError
from kvasir.server.requests.admission.forecast import LEAST_SHARE, Forecast, Snapshot, Work
from kvasir.server.requests.admission.queue import longest_wait

N_SLOTS, CHUNK = 4, 64


@dataclass(eq=False)
class Request:
    arrived: float
    n_prompt: int
    n_new: int  # it gets exactly as many
    deadline: float
    is_sure: bool = False  # admission knows that it gets all its new tokens
    feasible: bool = False  # it would meet its deadline if no request came after it
    latest: float = math.inf  # the moment at which it is shed if it still waits
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
    """First come, first served, with chunked prompts.

    A step takes `base` seconds, and `each` for every prompt token.
    """

    base: float
    each: float
    now: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    forecast: Forecast = field(default_factory=Forecast)
    ends: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> Snapshot:
        running, waiting = (
            tuple(request.work(self.now) for request in some)
            for some in (self.running, self.waiting)
        )
        n_waiting_tokens = sum(request.n_prompt for request in self.waiting)
        return Snapshot(self.forecast, N_SLOTS, running, waiting, n_waiting_tokens)

    def admit(self, request: Request) -> bool:
        """Let a request wait, or return False when it is refused."""
        try:
            wait = longest_wait(self.snapshot(), request.work(self.now))
        except OverloadedError:
            self.ends["refused"] += 1
            return False
        request.latest = self.now + wait
        self.waiting.append(request)
        return True

    def step(self) -> None:
        """Shed requests that waited too long, take a step, and end those that are late or done."""
        for request in list(self.waiting):
            if self.now > request.latest:
                self.waiting.remove(request)
                self.ends["shed"] += 1
                self.ends["wrongly shed"] += request.feasible
        decoding = [request for request in self.running if request.is_read]
        n_prefill = self._read()
        seconds = self.base + self.each * n_prefill
        self.now += seconds
        for request in decoding:
            request.n_got += 1
        stats = StepStats(len(decoding), n_prefill, CHUNK, 0, 0, 0, 0, seconds)
        self.forecast.step(stats)
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
                if not self.waiting or len(self.running) == N_SLOTS:
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


def is_feasible(simulation: Simulation, request: Request) -> bool:
    """The oracle: serve all that was admitted before the request, then it, and nothing after it."""
    running, waiting = (
        [replace(one, deadline=math.inf, latest=math.inf) for one in some]
        for some in (simulation.running, [*simulation.waiting, request])
    )
    other = Simulation(simulation.base, simulation.each, simulation.now, waiting, running)
    wanted = waiting[-1]
    while wanted.n_got < wanted.n_new:
        other.step()
    return other.now <= request.deadline


def arrivals(
    chance: random.Random, load: float, kind: str, simulation: Simulation, n: int
) -> list[Request]:
    """Poisson arrivals at `load` times the engine's capacity."""
    now, requests = 0.0, []
    for _ in range(n):
        n_prompt, n_new = {
            "even": (16, 20),
            "long": (300, 4),
            "mixed": chance.choice([(8, 4), (60, 60)]),
        }[kind]
        seconds = max(
            n_new * simulation.base / N_SLOTS,
            n_prompt * (simulation.each + simulation.base / CHUNK),
        )
        now += chance.expovariate(1) * seconds / load
        requests.append(Request(now, n_prompt, n_new, 0.0))
    return requests


def play(
    load: float, kind: str, slack: float, *, each: float, is_sure: bool = False, check: bool = False
) -> Simulation:
    """Run a simulation; `slack` is the deadline in multiples of a request's time alone."""
    chance = random.Random(1)
    simulation = Simulation(base=0.01, each=each)
    for request in arrivals(chance, load, kind, simulation, int(80 * max(1.0, load))):
        n_steps = request.n_new + -(-request.n_prompt // CHUNK)
        alone = n_steps * simulation.base + request.n_prompt * simulation.each
        request.deadline, request.is_sure = request.arrived + slack * alone, is_sure
        simulation.run_until(request.arrived)
        request.feasible = check and is_feasible(simulation, request)
        if not simulation.admit(request):
            simulation.ends["wrongly refused"] += request.feasible
    return simulation


@pytest.mark.parametrize(
    ("kind", "each", "is_sure", "spared"),
    [
        *((kind, 0.0, True, 0.0) for kind in ("even", "long", "mixed")),
        *(("mixed", 0.0002, False, 0.1), ("long", 0.0002, True, 0.1), ("mixed", 0.002, False, 0.5)),
    ],
)
def test_a_refused_request_could_not_have_met_its_deadline(
    kind: str, each: float, is_sure: bool, spared: float
) -> None:
    """Neither where all steps take the same time, nor where prompts make them longer.

    `spared`: share of the shed requests that were feasible, where steps hold many prompts.
    """
    ends = play(2.0, kind, 4.0, each=each, is_sure=is_sure, check=True).ends
    assert ends["refused"] > 20
    assert ends["wrongly refused"] == 0
    assert ends["wrongly shed"] <= spared * ends["shed"]


@pytest.mark.parametrize(("kind", "slack"), [("even", 2.5), ("long", 6.0), ("mixed", 6.0)])
def test_overload_does_not_lower_the_rate_of_answers_in_time(kind: str, slack: float) -> None:
    """Most other requests are refused at once; none takes a slot from one that is in time."""
    played = [play(load, kind, slack, each=0.0002) for load in (1.0, 2.0, 10.0)]
    rates = [simulation.ends["good"] / simulation.now for simulation in played]
    assert rates[-1] >= 0.9 * max(rates)
    assert played[-1].ends["refused"] > 2 * played[-1].ends["shed"]


def test_estimates_follow_from_the_work_ahead() -> None:
    """Lower bounds are three quarters of the measured times."""
    forecast = Forecast()
    forecast.step(StepStats(2, 64, CHUNK, 0, 0, 0, 0, 1.0))  # 1 s a token, 64 prompt tokens a s
    forecast.step(StepStats(2, 10, CHUNK, 0, 0, 0, 0, 1.0))  # not full: gives no prompt rate
    forecast.ended(40.0)
    assert forecast.seconds_to_run(Work(64, 3)) == 1.0 + 3.0
    assert forecast.least_seconds_to_run(Work(64, 3), 3) == 3.0

    def seconds_to_slot(n_slots: int, running: list[Work], *waiting: Work) -> float:
        return Snapshot(forecast, n_slots, tuple(running), waiting).seconds_to_slot()

    taken = [Work(0, 100, seconds_held=24.0), Work(0, 12)]  # 30 - 24 seconds, and 9
    sure = [taken[0]._replace(n_certain=11), taken[1]]
    assert seconds_to_slot(3, taken) == 0.0
    assert seconds_to_slot(2, taken) == 6.0
    assert seconds_to_slot(2, sure) == 8.25
    assert seconds_to_slot(2, taken, Work(0, 1)) == 6.75
    assert seconds_to_slot(2, taken, Work(0, 99, seconds_left=9.0)) == 6.0  # it will be shed
    assert seconds_to_slot(9, [Work(128, 1)], Work(192, 1)) == 3.75
    forecast.step(StepStats(2, 0, CHUNK, 0, 0, 0, 0, 0.5))  # a step without prompts
    assert forecast.least_seconds_to_run(Work(64, 3), 3) == LEAST_SHARE * (1.0 + 3 * 0.5)


def test_only_what_comes_first_in_the_order_is_ahead() -> None:
    """By age and by the prompts' work: a short request is not behind a long one."""
    rates = Forecast()
    rates.step(StepStats(0, 64, CHUNK, 0, 0, 0, 0, 0.64))  # 10 ms a token, 0.32 s of age
    waiting = tuple(Work(n, 1, queue_time=at) for n, at in ((1, 3.0), (2, 5.0), (3, 3.5), (90, 0)))
    running = Work(800, 9, n_before=200), Work(0, 9)
    ahead = Snapshot(rates, 4, running, waiting).ahead_of(Work(2, 1, queue_time=4.0))
    assert [work.n_prompt for work in ahead.waiting] == [1, 3]
    assert [work.n_prompt for work in ahead.running] == [0, 0]
    behind = Snapshot(rates, 4, running, waiting).ahead_of(Work(900, 1, queue_time=4.0))
    assert [work.n_prompt for work in behind.running] == [800, 0]
    assert len(behind.waiting) == 4


def test_the_depth_of_a_prompt_counts() -> None:
    """Would catch a forecast that takes a long prompt for many short ones."""
    rates = Forecast()
    # 1 ms a token with none before it; each one before it adds a thousandth.
    rates.step(StepStats(0, 64, CHUNK, 0, 0, 0, 0, 0.192, n_before=2000.0, slowdown=0.001))
    assert rates.seconds_to_run(Work(1000, 0)) == pytest.approx(1.5)
    assert rates.seconds_to_run(Work(500, 0, n_before=1500)) == pytest.approx(0.5 * 2.75)


def test_a_step_is_full_by_the_budget_that_it_had() -> None:
    """Beside streams steps take fewer tokens; without them no prompt's rate would be known."""
    forecast = Forecast()
    forecast.step(StepStats(2, 32, 32, 0, 0, 0, 0, 0.5))
    assert forecast.seconds_to_run(Work(64, 0)) == 1.0


def test_cached_tokens_and_accepted_drafts_save_time() -> None:
    cached, drafted = Forecast(), Forecast()
    cached.step(StepStats(0, 48, CHUNK, 1088, 1040, 0, 0, 0.5))
    drafted.step(StepStats(2, 0, CHUNK, 0, 0, 4, 2, 0.5))
    assert cached.seconds_to_run(Work(1088, 0)) == pytest.approx(0.5)
    assert drafted.seconds_to_run(Work(0, 4)) == 1.0


def test_what_a_sequence_still_needs() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=5)
    sequence = Sequence(0, [1] * 10, params, frozenset(), 2.0, deadline=50.0, n_certain=5)
    assert Work.of(sequence, 7.0) == Work(10, 9, 5, 0.0, 43.0, sequence.queue_key[0], 0)
    sequence.scheduled_at, sequence.n_computed, sequence.output_ids = 3.0, 4, [1, 2, 3]
    assert Work.of(sequence, 7.0) == Work(6, 6, 2, 4.0, 43.0, sequence.queue_key[0], 4)
    sequence.n_computed, sequence.output_ids = 16, [1] * 7
    assert Work.of(sequence, 7.0) == Work(0, 2, 0, 4.0, 43.0, sequence.queue_key[0], 10)
