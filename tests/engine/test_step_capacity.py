"""Prompt chunks beside streams, on a simulated machine whose steps take exactly what they cost."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from kvasir.server.engine.batch import StepBatch
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.step_capacity import StepCapacity
from tests.kit.engine_driver import Collector, make_sequence
from tests.kit.fake_runner import FakeRunner

CHUNK = 256
LEAST = 8


@dataclass(frozen=True)
class Machine:
    """Seconds of a step's parts."""

    decode: float = 0.007  # of a decode run
    row: float = 0.0006  # of each of its rows
    run: float = 0.004  # of a chunk, however short; whole prompts of one length share it
    token: float = 0.0003
    past: float = 0.0  # of each token for each one before it
    other: float = 0.0005  # sampling
    noise: float = 0.0
    hiccups: float = 0.0  # share of runs that take six times as long
    one_run: bool = False  # decodes and prompts run together, as on a GPU

    def target(self, n_decodes: float | None) -> float:
        """The seconds of so many decode runs of four rows, or the default target."""
        decode = self.decode + 4 * self.row
        return n_decodes * decode if n_decodes else 4 * (decode + self.run * (not self.one_run))

    def slower(self, factor: float) -> Machine:
        names = ("decode", "row", "run", "token", "past", "other")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


class SimulatedRunner(FakeRunner):
    """A clock moves by what each run costs."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(50, max_model_len=4096, max_num_seqs=16)
        self.machine, self.now, self._chance = machine, 0.0, random.Random(0)

    def clock(self) -> float:
        return self.now

    def _luck(self) -> float:
        noise, hiccups = self.machine.noise, self.machine.hiccups
        factor = 6.0 if hiccups and self._chance.random() < hiccups else 1.0
        return factor * self._chance.uniform(1 - noise, 1 + noise)

    def run(self, batch: StepBatch) -> Logits:
        machine, n = self.machine, len(batch.decodes)
        decode = (machine.decode + machine.row * n) if n else 0.0
        decode *= self._luck()
        whole = [c for c in batch.prefills if c.start == 0 and c.completes_prompt]
        n_runs = len(batch.prefills) - len(whole) + len({c.count for c in whole})
        prompts = sum(
            c.count * (machine.token + machine.past * (c.start + c.count / 2))
            for c in batch.prefills
        )
        prompts += 0.0 if machine.one_run and n else machine.run * n_runs
        prompts *= self._luck()
        self.now += decode + prompts + machine.other
        if not (machine.one_run and batch.prefills):
            self.decode_seconds += decode
        return super().run(batch)


@dataclass
class Step:
    n_decode: int
    n_prefill: int
    seconds: float


class Load:
    """Streams, prompts that come beside them, and what each step took."""

    def __init__(self, machine: Machine, target: float | None) -> None:
        self.runner = SimulatedRunner(machine)
        self.engine = Engine(
            self.runner, chunk_size=CHUNK, itl_target=target, clock=self.runner.clock
        )
        self.collector, self.prompts = Collector(), list[list[int]]()

    def add(self, n_prompt: int, max_tokens: int) -> None:
        i = len(self.prompts)
        self.prompts.append(prompt_ids := [(i + 7 * n) % 50 for n in range(n_prompt)])
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.add(make_sequence(i, prompt_ids, params))

    def step(self) -> Step:
        outputs, stats = self.engine.step()
        self.collector.take(outputs)
        return Step(stats.n_decode, stats.n_prefill_tokens, stats.seconds)

    def serve(self, *prompts: int, new: int = 2) -> list[Step]:
        """Send prompts one after the other, each when the one before has ended; its steps."""
        steps = []
        for n_prompt in prompts:
            result = self.collector.results[len(self.prompts)]
            self.add(n_prompt, new)
            while not result.finish_reasons:
                steps.append(self.step())
        return steps


def with_streams(machine: Machine, target: float | None, n_streams: int = 4) -> Load:
    """A server that has measured a prompt and a few steps, and runs endless streams."""
    load = Load(machine, target)
    for _ in range(n_streams):
        load.add(20, 3000)
    load.serve(300)
    return load


MACHINES = {
    "plain": Machine(),
    "noisy": Machine(noise=0.05),
    "long context": Machine(past=3e-7),
    "slow decodes": Machine(decode=0.03),
    "one run": Machine(decode=0.1, token=0.001, one_run=True),
    "large model": Machine(decode=0.2, row=0.003, run=0.15, token=0.006, past=1e-7, other=0.001),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("n_decodes", [None, 2.5, 6.0])
def test_steps_with_streams_keep_to_the_target(name: str, n_decodes: float | None) -> None:
    """Would catch a capacity without the decodes, the cost of a past, or the default target."""
    machine = MACHINES[name]
    decode, target = machine.decode + 4 * machine.row, machine.target(n_decodes)
    load = with_streams(machine, n_decodes and target)
    load.serve(900)  # the first chunks after long ones may be too large
    steps = [step for step in load.serve(1500, 40, 2500, 700) if step.n_prefill and step.n_decode]
    most = target * (1 + 2 * machine.noise) if n_decodes is None else target
    assert all(step.seconds <= most for step in steps if step.n_prefill > LEAST)
    mean = sum(step.n_prefill for step in steps) / len(steps)
    affordable = (0.75 * target - decode - machine.run) / (machine.token + machine.past * 1500)
    assert mean >= min(0.9 * CHUNK, max(LEAST, affordable)), "the target is not used"
    for i in range(4, 10):
        sequence = load.prompts[i]
        assert load.collector.results[i].token_ids == load.runner.greedy(sequence, 2)


@pytest.mark.parametrize(
    ("target", "n_streams"), [(None, 0), (1e-6, 0), (0.03, 0), (0.0, 4)], ids=str
)
def test_prompts_without_streams_or_a_target_run_in_whole_chunks(
    target: float | None, n_streams: int
) -> None:
    """Would catch a time to first token that pays for streams that do not exist."""
    load = with_streams(Machine(), target)
    for i in range(n_streams, 4):
        load.engine.abort(i)
    assert [step.n_prefill for step in load.serve(600)] == [CHUNK, CHUNK, 88, 0]


def test_a_target_that_cannot_be_met_still_lets_prompts_end() -> None:
    load = with_streams(Machine(), 1e-6)
    assert [step.n_prefill for step in load.serve(80)] == [LEAST] * 10 + [0]


@pytest.mark.parametrize("name", ["slow decodes", "one run"])
@pytest.mark.parametrize("n_decodes", [None, 3.6])
def test_chunks_follow_a_machine_that_changes_speed(name: str, n_decodes: float | None) -> None:
    """Would catch decodes that are never timed again because every step has prompts."""
    machine = MACHINES[name]
    load = with_streams(machine, n_decodes and machine.target(n_decodes))
    load.serve(2000)
    for factor in (2.0, 1.0):
        load.runner.machine = machine.slower(factor)
        steps = load.serve(4000, 4000, 4000, new=1)[20:]
        goal = machine.target(n_decodes) * (1 if n_decodes else factor)
        assert all(step.seconds <= goal for step in steps if step.n_prefill > LEAST)
        assert max(step.seconds for step in steps) >= 0.8 * goal or steps[0].n_prefill == CHUNK
        assert sum(step.n_prefill == 0 for step in steps) <= len(steps) / 32 + 1


@pytest.mark.parametrize("at_once", [1, 8])
def test_tiny_prompts_tell_nothing_wrong_about_long_ones(at_once: int) -> None:
    """Eight that share a run take a fraction of what they would alone."""
    load = with_streams(Machine(), 0.04)
    load.serve(900)
    expected = [step.n_prefill for step in load.serve(900)]
    for _ in range(20):
        for _ in range(at_once):
            load.add(5, 1)
        while load.engine.scheduler.waiting:
            load.step()
    steps = load.serve(900)
    assert steps[0].n_prefill >= 0.7 * expected[0]
    assert all(step.seconds <= 0.04 for step in steps if step.n_prefill > LEAST)


def test_a_hiccup_does_not_stop_prompts() -> None:
    load = with_streams(Machine(), 0.06)
    load.serve(900)
    load.add(2000, 2)
    before = load.step().n_prefill
    load.runner.machine = Machine().slower(100)
    load.step()
    load.runner.machine = Machine()
    assert load.step().n_prefill >= 0.7 * before


@pytest.mark.parametrize("one_run", [False, True])
def test_many_hiccups_neither_stop_prompts_nor_let_them_loose(one_run: bool) -> None:
    """As on a machine that others use: the parts of the cost must not be taken for each other."""
    machine = Machine(past=3e-7, noise=0.1, hiccups=0.15, one_run=one_run)
    load = with_streams(machine, 0.06, n_streams=2)
    load.serve(900)
    sizes = [step.n_prefill for step in load.serve(3000) if step.n_prefill][:-1]
    # Without noise: 124 and 136 tokens at first, 32 and 36 at the end.
    assert 20 <= sum(sizes[-20:]) / 20 <= 80
    assert max(sizes[len(sizes) // 2 :]) <= CHUNK // 2


def test_short_prompts_share_a_step_as_far_as_they_fit() -> None:
    load = with_streams(Machine(), 0.05)
    load.serve(900)
    for _ in range(8):
        load.add(20, 2)
    steps = [load.step() for _ in range(8)]
    assert 2 * 20 <= max(step.n_prefill for step in steps) <= 5 * 20
    assert all(step.seconds <= 0.05 for step in steps)
    assert sum(step.n_prefill for step in steps) == 8 * 20


def test_larger_chunks_have_a_larger_least_size() -> None:
    capacity = StepCapacity(2048, 0.001)
    capacity.record(9.0, 1, 0.5, [(2048, 0)])
    room = capacity.room(has_streams=True)
    assert room.limit(0, 2048, is_first=True) == 64
    assert room.limit(0, 2048, is_first=False) == 0
