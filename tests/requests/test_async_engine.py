"""The engine behind its thread: one terminal output for each sequence, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import pytest

from server.engine.engine import Engine, TokenOutput
from server.engine.sampling import SamplingParams
from server.engine.sequence import PRIORITY_LEVEL_SECONDS, FinishReason, Sequence, SequenceTimes
from server.errors import EngineError
from server.requests.async_engine import AsyncEngine, OutputStream
from tests.fake_runner import FakeRunner

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


def sequences(engine: AsyncEngine, *prompts: list[int], max_tokens: int = 4) -> list[Sequence]:
    first = engine.new_ids(len(prompts))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Sequence(first + i, prompt, params, frozenset(), SequenceTimes(perf_counter()))
        for i, prompt in enumerate(prompts)
    ]


async def collect(stream: OutputStream, n_sequences: int) -> dict[int, list[TokenOutput]]:
    """Outputs by sequence, until that many have ended."""
    outputs: dict[int, list[TokenOutput]] = {}
    ended = 0
    async with asyncio.timeout(30):
        while ended < n_sequences:
            for output in await stream.receive():
                outputs.setdefault(output.sequence_id, []).append(output)
                ended += output.finish_reason is not None
    return outputs


def reasons(outputs: dict[int, list[TokenOutput]]) -> list[FinishReason | None]:
    """How each sequence ended; every output before the last must be unfinished."""
    assert all(
        output.finish_reason is None for of_one in outputs.values() for output in of_one[:-1]
    )
    return [of_one[-1].finish_reason for of_one in outputs.values()]


def value(engine: AsyncEngine, name: str, **labels: str) -> float:
    return engine.metrics.registry.get_sample_value(f"kvasir_{name}", labels) or 0.0


async def test_each_sequence_gets_its_own_tokens_and_one_end() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=3)
    prompts = [[i + 1] * (1 + i % 6) for i in range(8)]
    async with running(runner) as engine:
        added = sequences(engine, *prompts, max_tokens=5)
        outputs = await collect(engine.submit(added), len(added))
    assert set(reasons(outputs)) == {FinishReason.LENGTH}
    for sequence, prompt in zip(added, prompts, strict=True):
        assert [output.token_id for output in outputs[sequence.id]] == runner.greedy(prompt, 5)


async def test_the_event_loop_is_woken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=4)
    async with running(runner) as engine:
        loop, wakes = asyncio.get_running_loop(), 0
        wake = loop.call_soon_threadsafe

        def counting(*args: object) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        added = sequences(engine, [1], [2], [3], [4], max_tokens=6)
        await collect(engine.submit(added), 4)
        assert wakes == len(runner.batches)


async def test_what_the_client_left_is_aborted_in_any_state_and_counted_as_wasted() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        first, second = sequences(engine, [1, 2], [3], max_tokens=20)
        leaving, queued, staying = (
            engine.submit([first]),
            engine.submit([second]),
            engine.submit(sequences(engine, [5], max_tokens=2)),
        )
        runner.allow(3)
        runner.wait_until_held()
        seen = await leaving.receive()
        assert engine.load()[:2] == (1, 2)
        leaving.close()
        queued.close()
        runner.release()
        assert reasons(await collect(staying, 1)) == [FinishReason.LENGTH]
        assert runner.kv.reserved_tokens == 0
    wasted = value(engine, "tokens_wasted_total")
    assert len(seen) <= wasted == len(first.output_ids) < 20
    assert value(engine, "request_success_total", finished_reason="abort") == 2


async def test_a_stop_string_ends_a_sequence_without_counting_it_as_left() -> None:
    runner = FakeRunner(VOCAB_SIZE)
    async with running(runner) as engine:
        runner.hold()
        added = sequences(engine, [1], [2], max_tokens=6)
        stream = engine.submit(added)
        runner.allow(2)
        runner.wait_until_held()
        await stream.receive()
        stream.stop(added[0].id)
        runner.release()
        outputs = await collect(stream, 1)
    assert reasons({added[1].id: outputs[added[1].id]}) == [FinishReason.LENGTH]
    assert value(engine, "request_success_total", finished_reason="stop") == 1
    assert value(engine, "tokens_wasted_total") == 0


async def test_a_deadline_ends_queued_and_running_sequences_in_an_output() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit(sequences(engine, [1], [2], max_tokens=30))
        runner.allow(2)
        runner.wait_until_held()
        stream.expire()
        runner.release()
        outputs = await collect(stream, 2)
    assert reasons(outputs) == [FinishReason.TIMEOUT] * 2


class Panic(BaseException):
    """As what Rust libraries raise: no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_a_failing_step_ends_everything_and_whoever_comes_later_is_told(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=2)
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit(sequences(engine, [1], [2], [3], max_tokens=9))
        runner.allow(2)
        runner.wait_until_held()
        runner.error = kind("the device is gone")
        runner.release()
        with caplog.at_level(logging.CRITICAL, logger="kvasir"):
            outputs = await collect(stream, 3)
        assert reasons(outputs) == [FinishReason.ERROR] * 3
        assert not engine.is_healthy
        with pytest.raises(EngineError):
            engine.submit(sequences(engine, [1]))
        assert engine.load()[1] == 0


async def test_outputs_that_cannot_be_handed_out_leave_nobody_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(FakeRunner(VOCAB_SIZE, max_num_seqs=2)) as engine:
        monkeypatch.setattr(engine.metrics, "next_token", lambda _: 1 / 0)
        with caplog.at_level(logging.CRITICAL, logger="kvasir"):
            outputs = await collect(
                engine.submit(sequences(engine, [1], [2], [3], max_tokens=9)), 3
            )
        assert reasons(outputs) == [FinishReason.ERROR] * 3
        assert not engine.is_healthy


async def test_stopping_ends_what_runs_and_what_waits() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit(sequences(engine, [1], [2], max_tokens=30))
        runner.wait_until_held()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        runner.release()
        await stopping
        assert reasons(await collect(stream, 2)) == [FinishReason.ABORT] * 2


async def test_a_hanging_engine_that_is_given_up_leaves_nobody_waiting() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit(sequences(engine, [1], [2]))
        runner.wait_until_held()
        engine.give_up()
        assert reasons(await collect(stream, 2)) == [FinishReason.ERROR] * 2


async def test_only_those_without_a_row_end_when_the_queue_is_shed() -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        runs, waits = engine.submit(sequences(engine, [1])), engine.submit(sequences(engine, [2]))
        runner.wait_until_held()
        engine.abort_waiting()
        runner.release()
        assert reasons(await collect(waits, 1)) == [FinishReason.ABORT]
        assert reasons(await collect(runs, 1)) == [FinishReason.LENGTH]


@pytest.mark.parametrize("n_runs", [0, 1])
async def test_a_request_that_has_begun_is_not_shed_for_those_of_it_that_wait(n_runs: int) -> None:
    """When the queue is shed, its first sequence is in its first step, or has just ended."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        begun = engine.submit(sequences(engine, [1], [2], max_tokens=2))
        waits = engine.submit(sequences(engine, [3], [4]))
        runner.allow(n_runs)
        runner.wait_until_held()
        engine.abort_waiting()
        runner.release()
        assert reasons(await collect(waits, 2)) == [FinishReason.ABORT] * 2
        assert reasons(await collect(begun, 2)) == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(("raised", "expected"), [(OSError, OSError), (Panic, RuntimeError)])
async def test_what_building_the_engine_raises_reaches_the_caller(
    raised: type[BaseException], expected: type[Exception]
) -> None:
    def build() -> Engine:
        raise raised("no such model")

    with pytest.raises(expected, match="no such model"):
        await AsyncEngine().start(build)


async def test_a_newcomer_sees_who_stands_before_it() -> None:
    """One in its row after three steps of seven, and of those that wait the ones whose turn is not later."""
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    async with running(runner) as engine:
        runner.hold()
        (runs,) = sequences(engine, [1, 2], max_tokens=7)
        shared = [3] * 5
        waits = sequences(engine, shared, shared, [4] * 6, max_tokens=8)
        engine.submit([runs])
        streams = [engine.submit(waits)]
        waits[2].priority = 1
        waits[0].deadline = perf_counter() + 1000.0
        runner.allow(3)
        runner.wait_until_held()
        backlog = engine.backlog(perf_counter())
        assert backlog.n_rows == 1
        assert [(work.n_prompt, work.n_new) for work in backlog.running] == [(0, 4)]
        assert backlog.running[0].held > 0
        assert [(work.n_prompt, work.n_new, work.held) for work in backlog.waiting] == [
            (5, 8, 0.0)
        ] * 2
        assert backlog.waiting[0].left < 1000.0 < backlog.waiting[1].left == math.inf
        assert backlog.n_waiting_tokens == 5 + 6  # samples of one prompt share it
        assert len(engine.backlog(perf_counter() + PRIORITY_LEVEL_SECONDS).waiting) == 3
        runner.release()
        await collect(streams[0], 3)
        assert engine.forecast.seconds_held > 0


async def test_a_step_that_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(VOCAB_SIZE)
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit(sequences(engine, [1]))
        runner.wait_until_held()
        assert engine.is_healthy
        monkeypatch.setattr("server.requests.async_engine.STALL_SECONDS", 0.0)
        assert not engine.is_healthy
        runner.release()
        await collect(stream, 1)


async def test_memory_goes_back_when_nothing_comes_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.requests.async_engine._IDLE_SECONDS", 0.0)
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
            await collect(engine.submit(sequences(engine, [1, 2, 3])), 1)
            async with asyncio.timeout(30):
                while (held := await returned.get())[0] == 0:  # before the request came
                    pass
            assert held == (3 + 4 + 3, 0)  # the sequence, and its prompt's floats


@pytest.mark.parametrize("seed", range(5))
async def test_random_leaving_stopping_and_expiring_leaks_nothing(seed: int) -> None:
    chance = random.Random(seed)
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=3, budget_tokens=60)
    ended: list[FinishReason | None] = []

    async def client(engine: AsyncEngine) -> None:
        added = sequences(
            engine, *[[chance.randrange(VOCAB_SIZE)] * chance.randint(1, 9) for _ in range(2)]
        )
        stream = engine.submit(added)
        try:
            act = chance.choice(["stay", "leave", "expire", "stop"])
            if act == "leave":
                return
            if act == "expire":
                stream.expire()
            if act == "stop":
                stream.stop(added[0].id)
            ended.extend(reasons(await collect(stream, 1 if act == "stop" else 2)))
        finally:
            stream.close()

    async with running(runner) as engine:
        await asyncio.gather(*(client(engine) for _ in range(20)))
        last = sequences(engine, [1])
        await collect(engine.submit(last), 1)
        assert engine.load() == (0, 0, 0.0)
    total = sum(
        value(engine, "request_success_total", finished_reason=reason) for reason in FinishReason
    )
    assert total == 41
    assert set(ended) <= {FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.ABORT, None}
