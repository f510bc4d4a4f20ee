"""The engine behind asyncio: one thread owns it, and the event loop is woken once per step.

The event loop puts commands in an inbox, and the thread runs them before each step. Each accepted
sequence ends in exactly one terminal output: the engine's, or one made here when the engine fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, perf_counter
from typing import Any

from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.engine import BeamOutput, Engine, StepStats, TokenOutput
from kvasir.server.engine.sequence import FinishReason, Sequence, SequenceStatus
from kvasir.server.errors import EngineError
from kvasir.server.requests.admission.forecast import Forecast, Snapshot, Work
from kvasir.server.telemetry.metrics import Load, Metrics

logger = logging.getLogger("kvasir")

STALL_SECONDS = 120.0  # a step that takes longer means that the engine hangs
_JOIN_SECONDS = 5.0
_IDLE_SECONDS = 10.0
_MOST_AT_ONCE = 64  # outputs, of which events are made in some 5 ms, with 20 logprobs each
_IN_SLOT = {SequenceStatus.PREFILLING, SequenceStatus.RUNNING}

AnyEngine = Engine | EncoderEngine
Command = Callable[[Any], Iterable[TokenOutput | None]]  # of an engine


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence that has not ended."""

    sequence: Sequence
    request: list[Sequence]  # all sequences of its request
    queue: asyncio.Queue[TokenOutput]
    last_output: float | None = None
    cancelled_as: FinishReason | None = None  # the end that its listener gave it


@dataclass(frozen=True, slots=True, eq=False)
class OutputStream:
    """The outputs of one request's sequences. It must be closed, which cancels what still runs."""

    _engine: AsyncEngine
    _ids: list[int]
    _queue: asyncio.Queue[TokenOutput]

    async def receive(self) -> list[TokenOutput]:
        """Wait for output; return what has come since the last call, but not too much at once."""
        if not self._queue.empty():  # the client reads slowly: others have their turn
            await asyncio.sleep(0)
        outputs = [await self._queue.get()]
        while not self._queue.empty() and len(outputs) < _MOST_AT_ONCE:
            outputs.append(self._queue.get_nowait())
        return outputs

    def expire(self) -> None:
        """End what still runs after its deadline, with a terminal output."""
        self._engine.abort(self._ids, FinishReason.TIMEOUT)

    def finish(self) -> None:
        """End what still runs as if its text were complete, with a terminal output."""
        self._engine.abort(self._ids, FinishReason.STOP)

    def stop(self, sequence_id: int) -> None:
        """End a sequence that has produced a stop string; it gives no further output."""
        self._engine.cancel([sequence_id], FinishReason.STOP)

    def close(self) -> None:
        """Cancel all sequences that have not ended."""
        self._engine.cancel(self._ids, FinishReason.ABORT)


class AsyncEngine:
    """An engine in a thread of its own. All methods are for the event loop's thread.

    Gauges and the heartbeat are single values, which need not agree: they are read without a lock.
    """

    def __init__(self, metrics: Callable[[Load], Metrics] = Metrics) -> None:
        self.metrics = metrics(self.occupancy)
        self.forecast = Forecast()
        self.failed = False
        self.engine: AnyEngine | None = None
        self.ids = count()  # of sequences
        self._live: dict[int, _Live] = {}
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread: Thread | None = None
        self._stopping = False
        self._busy_since: float | None = None  # start of the current step, None while idle

    @property
    def is_healthy(self) -> bool:
        """False once the engine has failed, and while a step hangs."""
        since = self._busy_since
        return not self.failed and (since is None or monotonic() - since < STALL_SECONDS)

    @property
    def is_running(self) -> bool:
        """True while the thread exists: loading, idle, or in a step."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that have not ended, by arrival. The engine's thread keeps changing them."""
        return [live.sequence for live in self._live.values()]

    def occupancy(self) -> tuple[float, float, float]:
        """Return clients' sequences in a slot, those that wait, the KV cache's reserved share."""
        if self.engine is None:
            return 0.0, 0.0, 0.0
        running, reserved = self.engine.occupancy
        n_clients = sum(not live.sequence.is_background for live in list(self._live.values()))
        return running, max(0, n_clients - running), reserved

    def snapshot(self) -> Snapshot:
        """Return the work of clients' sequences and the measured rates, for admission."""
        if self.engine is None:
            return Snapshot()
        now, n_slots = perf_counter(), self.engine.max_num_seqs
        clients = (sequence for sequence in self.sequences if not sequence.is_background)
        statuses = [(sequence, sequence.status) for sequence in clients]
        waiting = [sequence for sequence, status in statuses if status is SequenceStatus.WAITING]
        held = (sequence for sequence, status in statuses if status in _IN_SLOT)
        running = tuple(_work(sequence, now) for sequence in _by_row(held))
        # By identity: the samples of a prompt share it.
        n_tokens = sum({id(s.prompt_ids): len(s.prompt_ids) for s in waiting}.values())
        works = tuple(_work(sequence, now) for sequence in _by_row(waiting))
        return Snapshot(self.forecast, n_slots, running, works, n_tokens)

    async def start(self, build: Callable[[], AnyEngine]) -> None:
        """Start the thread and wait until it has built the engine. Raises what `build` raises."""
        built: Future[AnyEngine] = Future()
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._main, args=(build, built), name="engine", daemon=True)
        self._thread.start()
        self.engine = await asyncio.wrap_future(built)

    async def stop(self) -> None:
        """End every sequence and the thread, unless it hangs in a step."""
        if self.engine is None or self._thread is None:
            return
        self.abort_all()
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def submit(self, sequences: list[Sequence]) -> OutputStream:
        """Queue the admitted sequences of a request. Raises EngineError if the engine failed."""
        if self.failed:
            raise EngineError("the engine has failed; the server must be restarted")
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        for sequence in sequences:
            self._live[sequence.id] = _Live(sequence, sequences, queue)
        self._inbox.put(lambda engine: [_ended(engine.add, one) for one in sequences])
        return OutputStream(self, [sequence.id for sequence in sequences], queue)

    def abort(self, ids: Iterable[int], reason: FinishReason) -> None:
        """End live sequences, with a terminal output to each listener."""
        if live := [i for i in ids if i in self._live]:
            self._inbox.put(lambda engine: [engine.abort(i, reason) for i in live])

    def abort_all(self) -> None:
        """End every sequence with reason ABORT."""
        self.abort(list(self._live), FinishReason.ABORT)

    def abort_waiting(self) -> None:
        """End the requests of which no sequence has had a slot; the others stay whole."""
        requests = [(live.sequence.id, live.request) for live in self._live.values()]

        def abort(engine: AnyEngine) -> Iterable[TokenOutput | None]:
            waiting = SequenceStatus.WAITING
            ids = [i for i, request in requests if all(s.status is waiting for s in request)]
            return [engine.abort(i, FinishReason.ABORT) for i in ids]

        self._inbox.put(abort)

    def cancel(self, ids: Iterable[int], reason: FinishReason) -> None:
        """End sequences to which nobody listens any more; they give no further output."""
        ids = [i for i in ids if i in self._live and self._live[i].cancelled_as is None]
        for i in ids:
            self._live[i].cancelled_as = reason
        self.abort(ids, reason)

    def give_up(self) -> None:
        """Mark the engine as failed, end every sequence from here, and ignore later outputs."""
        self.failed = True
        ended, self._live = list(self._live.values()), {}
        for live in ended:
            if live.cancelled_as is None:
                end = TokenOutput(live.sequence.id, None, finish_reason=FinishReason.ERROR)
                live.queue.put_nowait(end)
        for live in ended:  # recording may raise, so every listener is told first
            self._record_end(live, FinishReason.ERROR)
        self._inbox.put(self._stop)

    # In the engine's thread

    def _main(self, build: Callable[[], AnyEngine], built: Future[AnyEngine]) -> None:
        built.set_running_or_notify_cancel()
        try:
            engine = build()
        except BaseException as error:  # a panic in Rust is not an Exception
            built.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
            return
        built.set_result(engine)
        try:
            while not self._stopping:
                self._step(engine)
        except BaseException:
            logger.exception("the engine failed")
            self._post(self.give_up)

    def _step(self, engine: AnyEngine) -> None:
        """Run the commands of the inbox, take a step, and wake the event loop."""
        ended = [end for command in self._commands(engine) for end in command(engine)]
        outputs: list[TokenOutput] = [end for end in ended if end is not None]
        stats = None
        if engine.has_work and not self._stopping:
            self._busy_since = monotonic()
            stepped, stats = engine.step()
            outputs += stepped
        if outputs or stats:
            self._post(self._deliver, outputs, stats)

    def _commands(self, engine: AnyEngine) -> Iterator[Command]:
        """Yield the commands of the inbox; while the engine is idle, wait for one."""
        if not engine.has_work:
            self._busy_since = None
            try:
                yield self._inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                engine.release_idle_memory()
                yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()

    def _stop(self, _engine: AnyEngine) -> Iterable[TokenOutput]:
        self._stopping = True
        return ()

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(callback, *args)

    # In the event loop's thread

    def _deliver(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        """Hand out a step's outputs. If that fails, the rest is lost and everything ends."""
        if self.failed:
            return
        try:
            self._hand_out(outputs, stats)
        except Exception:
            logger.exception("the engine's outputs are lost")
            self.give_up()

    def _hand_out(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        if stats is not None:
            self.metrics.step(stats)
            self.forecast.step(stats)
        now = perf_counter()
        for output in outputs:
            live, reason = self._live.get(output.sequence_id), output.finish_reason
            if live is None:  # adding it raised, and the engine runs it all the same
                continue
            if live.cancelled_as is None:
                live.queue.put_nowait(output)
            if reason is not None:
                del self._live[output.sequence_id]
            n_tokens = int(output.token_id is not None)
            if isinstance(output, BeamOutput):
                n_tokens = len(live.sequence.output_ids)  # the best text's
            self.metrics.output(live.sequence, live.last_output, now, n_tokens)
            live.last_output = now
            if reason is not None:
                self._record_end(live, reason)

    def _record_end(self, live: _Live, reason: FinishReason) -> None:
        is_wasted = live.cancelled_as is FinishReason.ABORT
        self.metrics.finished(live.sequence, live.cancelled_as or reason, wasted=is_wasted)
        scheduled, finished = live.sequence.scheduled_at, live.sequence.finished_at
        if scheduled is not None and finished is not None and not live.sequence.is_background:
            self.forecast.ended(finished - scheduled)


def _ended(add: Callable[[Any], None], sequence: Sequence) -> TokenOutput | None:
    """Add a sequence to an engine; if that raises, return the end of that sequence alone."""
    try:
        add(sequence)
    except Exception:
        logger.exception("the engine cannot add the sequence %d", sequence.id)
        return TokenOutput(sequence.id, None, finish_reason=FinishReason.ERROR)
    return None


def _by_row(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield each sequence as often as it takes rows."""
    return (sequence for sequence in sequences for _ in range(sequence.params.n_rows))


def _work(sequence: Sequence, now: float) -> Work:
    n_output, scheduled = len(sequence.output_ids), sequence.scheduled_at
    return Work(
        n_prompt=max(0, len(sequence.prompt_ids) - sequence.n_computed),
        n_new=sequence.params.max_tokens - n_output,
        n_certain=max(0, sequence.n_certain - n_output),
        seconds_held=0.0 if scheduled is None else now - scheduled,
        seconds_left=sequence.deadline - now,
        queue_time=sequence.queue_key[0],
    )
