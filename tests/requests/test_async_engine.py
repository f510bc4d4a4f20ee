"""The engine behind its thread: one terminal output for each sequence, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

import pytest

from kvasir.model.config import Pooling
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.engine import Engine, TokenOutput
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import PRIORITY_LEVEL_SECONDS, FinishReason, Sequence
from kvasir.server.errors import EngineError
from kvasir.server.requests.admission.forecast import Work
from kvasir.server.requests.async_engine import AsyncEngine, OutputStream
from tests.kit.fake_encoder import FakeTextRunner
from tests.kit.fake_runner import TIMEOUT, FakeRunner
from tests.kit.serving import sample

VOCAB_SIZE = 40


@asynccontextmanager
async def running(runner: FakeRunner) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine()
    await engine.start(lambda: Engine(runner, chunk_size=4))
    try:
        yield engine
    finally:
        runner.release()
        await engine.stop()
        assert not engine.is_running


@asynccontextmanager
async def held(max_num_seqs: int = 1) -> AsyncIterator[tuple[FakeRunner, AsyncEngine]]:
    """An engine whose steps wait until they are allowed."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=max_num_seqs)
    async with running(runner) as engine:
        runner.hold()
        yield runner, engine


def sequences(engine: AsyncEngine, *prompts: list[int], max_tokens: int = 4) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Sequence(next(engine.ids), prompt, params, frozenset(), perf_counter())
        for prompt in prompts
    ]


def submit(engine: AsyncEngine, *prompts: list[int], max_tokens: int = 4) -> OutputStream:
    return engine.submit(sequences(engine, *prompts, max_tokens=max_tokens))


async def collect(stream: OutputStream, n_sequences: int) -> dict[int, list[TokenOutput]]:
    """Outputs by sequence, until that many have ended."""
    outputs: dict[int, list[TokenOutput]] = {}
    ended = 0
    async with asyncio.timeout(TIMEOUT):
        while ended < n_sequences:
            for output in await stream.receive():
                outputs.setdefault(output.sequence_id, []).append(output)
                ended += output.finish_reason is not None
    return outputs


async def ends(stream: OutputStream, n_sequences: int) -> list[FinishReason | None]:
    """How each sequence ended; every output before the last must be unfinished."""
    outputs = (await collect(stream, n_sequences)).values()
    assert not any(output.finish_reason for of_one in outputs for output in of_one[:-1])
    return [of_one[-1].finish_reason for of_one in outputs]


def value(engine: AsyncEngine, name: str, **labels: str) -> float:
    return sample(engine.metrics, name, **labels) or 0.0


async def test_each_sequence_gets_its_own_tokens_and_one_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop is woken once per step."""
    runner, wakes = FakeRunner(VOCAB_SIZE, max_num_seqs=3), 0
    prompts = [[i + 1] * (1 + i % 6) for i in range(8)]
    async with running(runner) as engine:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counting(*args: Any) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        added = sequences(engine, *prompts, max_tokens=5)
        outputs = await collect(engine.submit(added), len(added))
        assert wakes == len(runner.batches)
    for sequence, prompt in zip(added, prompts, strict=True):
        tokens = [output.token_id for output in outputs[sequence.id]]
        assert tokens == runner.greedy(prompt, 5)
        assert outputs[sequence.id][-1].finish_reason is FinishReason.LENGTH


async def test_a_closed_stream_is_aborted_in_any_state_and_counted_as_wasted() -> None:
    async with held() as (runner, engine):
        first, second = sequences(engine, [1, 2], [3], max_tokens=20)
        started, queued = engine.submit([first]), engine.submit([second])
        other = submit(engine, [5], max_tokens=2)
        runner.allow(3)
        runner.wait_until_held()
        seen = await started.receive()
        assert engine.occupancy()[:2] == (1, 2)
        started.close()
        queued.close()
        runner.release()
        assert await ends(other, 1) == [FinishReason.LENGTH]
        assert runner.kv.reserved_tokens == 0
    wasted = value(engine, "tokens_wasted_total")
    assert len(seen) <= wasted == len(first.output_ids) < 20
    assert value(engine, "request_success_total", finished_reason="abort") == 2


@pytest.mark.parametrize("of_texts", [False, True])
async def test_a_sequence_that_is_refused_ends_alone(of_texts: bool) -> None:
    engine = AsyncEngine()
    build = (
        partial(EncoderEngine, FakeTextRunner(Pooling(kind="mean")), token_budget=9, max_num_seqs=4)
        if of_texts
        else partial(Engine, FakeRunner(VOCAB_SIZE), chunk_size=4)
    )
    await engine.start(build)
    kind, params = EncoderSequence if of_texts else Sequence, SamplingParams(max_tokens=4)
    too_long, good = (
        kind(next(engine.ids), [1] * n, params, frozenset(), perf_counter()) for n in (65, 2)
    )
    outputs = await collect(engine.submit([too_long, good]), 2)
    assert outputs[too_long.id][-1].finish_reason is FinishReason.ERROR
    whole = FinishReason.STOP if of_texts else FinishReason.LENGTH
    assert outputs[good.id][-1].finish_reason is whole
    assert engine.is_healthy
    assert not engine.sequences
    await engine.stop()


async def test_an_addition_that_fails_leaves_the_engine_idle() -> None:
    """Even one that fails when the sequence is in the queue already."""
    async with running(FakeRunner(VOCAB_SIZE)) as engine:
        assert isinstance(engine.engine, Engine)
        scheduler = engine.engine.scheduler
        add = scheduler.add

        def failing(sequence: Sequence) -> None:
            add(sequence)
            raise RuntimeError("a bug")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "add", failing)
            assert await ends(submit(engine, [1]), 1) == [FinishReason.ERROR]
        assert not engine.engine.has_work
        assert not scheduler.waiting
        assert await ends(submit(engine, [1]), 1) == [FinishReason.LENGTH]


async def test_a_slow_listener_gets_a_little_at_a_time_and_others_have_their_turn() -> None:
    n_tokens, n_turns, portions = 500, 0, list[int]()

    async def other() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    async with running(FakeRunner(VOCAB_SIZE, max_model_len=600)) as engine:
        stream = submit(engine, [1, 2], max_tokens=n_tokens)
        while engine.sequences:  # noqa: ASYNC110  its end is not announced
            await asyncio.sleep(0)
        beside = asyncio.create_task(other())
        while sum(portions) < n_tokens:
            portions.append(len(await stream.receive()))
        beside.cancel()
    assert max(portions) <= 64
    assert n_turns >= len(portions) > 1


async def test_a_stop_string_ends_a_sequence_and_wastes_nothing() -> None:
    async with held(max_num_seqs=8) as (runner, engine):
        added = sequences(engine, [1], [2], max_tokens=6)
        stream = engine.submit(added)
        runner.allow(2)
        runner.wait_until_held()
        await stream.receive()
        stream.stop(added[0].id)
        runner.release()
        outputs = await collect(stream, 1)
    assert outputs[added[1].id][-1].finish_reason is FinishReason.LENGTH
    assert value(engine, "request_success_total", finished_reason="stop") == 1
    assert value(engine, "tokens_wasted_total") == 0


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda _, stream: stream.end(FinishReason.TIMEOUT), FinishReason.TIMEOUT),
        (lambda engine, _: asyncio.ensure_future(engine.stop()), FinishReason.ABORT),
        (lambda engine, _: engine.give_up(), FinishReason.ERROR),
    ],
    ids=["deadline", "stop", "hang"],
)
async def test_queued_and_running_sequences_end_in_an_output(
    end: Callable[[AsyncEngine, OutputStream], object], reason: FinishReason
) -> None:
    async with held() as (runner, engine):
        stream = submit(engine, [1], [2], max_tokens=30)
        runner.allow(2)
        runner.wait_until_held()
        ending = end(engine, stream)
        await asyncio.sleep(0)
        runner.release()
        assert await ends(stream, 2) == [reason] * 2
        if isinstance(ending, asyncio.Future):
            await ending


class Panic(BaseException):
    """As what Rust libraries raise: no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic, None])
async def test_a_failing_step_ends_everything_and_refuses_later_requests(
    kind: type[BaseException] | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: the step succeeds, but its outputs cannot be handed out."""
    caplog.set_level(logging.CRITICAL, logger="kvasir")
    async with held(max_num_seqs=2) as (runner, engine):
        stream = submit(engine, [1], [2], [3], max_tokens=9)
        runner.allow(2)
        runner.wait_until_held()
        if kind is None:
            monkeypatch.setattr(engine.metrics, "output", lambda *_, **__: 1 / 0)
        else:
            runner.error = kind("the device is gone")
        runner.release()
        assert await ends(stream, 3) == [FinishReason.ERROR] * 3
        assert not engine.is_healthy
        with pytest.raises(EngineError):
            submit(engine, [1])
        assert engine.occupancy()[1] == 0


@pytest.mark.parametrize("n_runs", [0, 1])
async def test_only_requests_that_have_not_begun_end_when_the_queue_is_shed(n_runs: int) -> None:
    """The first sequence of the one that has begun is in its first step, or has just ended."""
    async with held() as (runner, engine):
        begun = submit(engine, [1], [2], max_tokens=2)
        waits = submit(engine, [3], [4])
        runner.allow(n_runs)
        runner.wait_until_held()
        engine.abort_waiting()
        runner.release()
        assert await ends(waits, 2) == [FinishReason.ABORT] * 2
        assert await ends(begun, 2) == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(("raised", "expected"), [(OSError, OSError), (Panic, RuntimeError)])
async def test_an_error_in_building_the_engine_reaches_the_caller(
    raised: type[BaseException], expected: type[Exception]
) -> None:
    def build() -> Engine:
        raise raised("no such model")

    engine = AsyncEngine()
    assert engine.snapshot().waiting == ()
    with pytest.raises(expected, match="no such model"):
        await engine.start(build)


async def test_a_snapshot_holds_the_work_of_all_sequences() -> None:
    """One runs after three steps of seven; of those that wait, one has a later turn."""
    async with held() as (runner, engine):
        submit(engine, [1, 2], max_tokens=7)
        shared = [3] * 5
        waits = sequences(engine, shared, shared, [4] * 6, max_tokens=8)
        stream = engine.submit(waits)
        waits[2].priority = 1
        waits[0].deadline = perf_counter() + 1000.0
        runner.allow(3)
        runner.wait_until_held()
        snapshot, now = engine.snapshot(), perf_counter()
        assert snapshot.n_slots == 1
        assert [(work.n_prompt, work.n_new) for work in snapshot.running] == [(0, 4)]
        assert snapshot.running[0].seconds_held > 0
        long = Work(100, 1, queue_time=now)
        ahead = snapshot.ahead_of(long).waiting
        assert [(one.n_prompt, one.n_new, one.seconds_held) for one in ahead] == [(5, 8, 0.0)] * 2
        assert ahead[0].seconds_left < 1000.0 < ahead[1].seconds_left == math.inf
        assert snapshot.n_waiting_tokens == 5 + 6  # the samples of a prompt share it
        later = long._replace(queue_time=now + PRIORITY_LEVEL_SECONDS)
        assert len(snapshot.ahead_of(later).waiting) == 3
        runner.release()
        await collect(stream, 3)
        assert engine.forecast.slot > 0


async def test_a_step_that_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held() as (runner, engine):
        stream = submit(engine, [1])
        runner.wait_until_held()
        assert engine.is_healthy
        monkeypatch.setattr("kvasir.server.requests.async_engine.STALL_SECONDS", 0.0)
        assert not engine.is_healthy
        runner.release()
        await collect(stream, 1)


async def test_an_idle_engine_returns_memory_and_serves_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.server.requests.async_engine._IDLE_SECONDS", 0.0)
    runner = FakeRunner(VOCAB_SIZE)
    loop, returned = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int]]()
    release = runner.kv.release_idle_memory

    def noting() -> None:
        before = runner.kv.committed_tokens
        release()
        loop.call_soon_threadsafe(returned.put_nowait, (before, runner.kv.committed_tokens))

    monkeypatch.setattr(runner.kv, "release_idle_memory", noting)
    async with running(runner) as engine:
        for _ in range(2):
            await collect(submit(engine, [1, 2, 3]), 1)
            async with asyncio.timeout(TIMEOUT):
                while (tokens := await returned.get())[0] == 0:  # before the request came
                    pass
            assert tokens == (3 + 4 + 3, 0)  # the sequence, and its prompt's floats


@pytest.mark.parametrize("seed", range(3))
async def test_random_cancels_stops_and_deadlines_leak_nothing(seed: int) -> None:
    chance = random.Random(seed)
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=3, budget_tokens=60)
    ended: list[FinishReason | None] = []

    async def client(engine: AsyncEngine) -> None:
        prompts = [[chance.randrange(VOCAB_SIZE)] * chance.randint(1, 9) for _ in range(2)]
        added = sequences(engine, *prompts)
        stream = engine.submit(added)
        try:
            act = chance.choice(["stay", "cancel", "expire", "stop"])
            if act == "expire":
                stream.end(FinishReason.TIMEOUT)
            if act == "stop":
                stream.stop(added[0].id)
            if act != "cancel":
                ended.extend(await ends(stream, 1 if act == "stop" else 2))
        finally:
            stream.close()

    async with running(runner) as engine:
        await asyncio.gather(*(client(engine) for _ in range(20)))
        await collect(submit(engine, [1]), 1)
        assert engine.occupancy() == (0, 0, 0.0)
    counts = [value(engine, "request_success_total", finished_reason=one) for one in FinishReason]
    assert sum(counts) == 41
    assert set(ended) <= {FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.ABORT, None}
