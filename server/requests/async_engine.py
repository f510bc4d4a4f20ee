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
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, perf_counter
from typing import Any

from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.engine import BeamOutput, Engine, TokenOutput
from kvasir.server.engine.sequence import FinishReason, Sequence, SequenceStatus
from kvasir.server.errors import EngineError
from kvasir.server.requests.admission.forecast import Forecast, Snapshot
from kvasir.server.telemetry.metrics import Metrics

logger = logging.getLogger("kvasir")

STALL_SECONDS = 120.0  # a step that takes longer means that the engine hangs
_JOIN_SECONDS = 5.0
_IDLE_SECONDS = 10.0
_MOST_AT_ONCE = 64  # outputs, of which events are made in some 5 ms, with 20 logprobs each

AnyEngine = Engine | EncoderEngine
Command = Callable[[Any], Iterable[TokenOutput | None]]  # of an engine


@dataclass(frozen=True, slots=True, eq=False)
class OutputStream:
    """The outputs of one request's sequences. It must be closed, which cancels what still runs."""

    sequences: list[Sequence]
    _engine: AsyncEngine
    queue: asyncio.Queue[TokenOutput] = field(default_factory=asyncio.Queue)

    @property
    def is_waiting(self) -> bool:
        """True while none of its sequences has a place in the batch."""
        return all(sequence.status is SequenceStatus.WAITING for sequence in self.sequences)

    @property
    def n_generated(self) -> int:
        """The number of tokens that the engine has generated, also for clients that do not read."""
        return sum(len(sequence.output_ids) * sequence.params.n_rows for sequence in self.sequences)

    async def receive(self) -> list[TokenOutput]:
        """Wait for output; return what has come since the last call, but not too much at once."""
        if not self.queue.empty():  # the client reads slowly: others have their turn
            await asyncio.sleep(0)
        outputs = [await self.queue.get()]
        while not self.queue.empty() and len(outputs) < _MOST_AT_ONCE:
            outputs.append(self.queue.get_nowait())
        return outputs

    def end(self, reason: FinishReason) -> None:
        """End what still runs, with a terminal output."""
        self._engine.abort([sequence.id for sequence in self.sequences], reason)

    def stop(self, sequence_id: int) -> None:
        """End a sequence that has produced a stop string; it gives no further output."""
        self._engine.cancel([sequence_id], FinishReason.STOP)

    def close(self) -> None:
        """Cancel all sequences that have not ended."""
        self._engine.cancel([sequence.id for sequence in self.sequences], FinishReason.ABORT)


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence that has not ended."""

    sequence: Sequence
    stream: OutputStream
    last_output: float | None = None
    cancelled_as: FinishReason | None = None  # the end that its listener gave it


class AsyncEngine:
    """An engine in a thread of its own. All methods are for the event loop's thread.

    Gauges and the heartbeat are single values, which need not agree: they are read without a lock.
    """

    def __init__(self, metrics: Callable[..., Metrics] = Metrics) -> None:
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
        return Snapshot.of(self.sequences, self.forecast, self.engine.max_num_seqs, perf_counter())

    async def start(self, build: Callable[[], AnyEngine]) -> None:
        """Start the thread and wait until it has built the engine. Raises what `build` raises."""
        built: Future[AnyEngine] = Future()
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._main, args=(build, built), name="engine", daemon=True)
        self._thread.start()
        self.engine = await asyncio.wrap_future(built)

    async def stop(self) -> None:
        """End every sequence and the thread, and let the engine go, unless it hangs in a step.

        It may be started again.
        """
        if self.engine is None or self._thread is None:
            return
        self.abort_all()
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if not (self.failed or self.is_running):
            self.engine = self._thread = self._busy_since = None
            self._inbox, self._stopping = SimpleQueue(), False

    def submit(self, sequences: list[Sequence]) -> OutputStream:
        """Queue the admitted sequences of a request. Raises EngineError if the engine failed."""
        if self.failed:
            raise EngineError("the engine has failed; the server must be restarted")
        stream = OutputStream(sequences, self)
        self._live |= {sequence.id: _Live(sequence, stream) for sequence in sequences}
        self._inbox.put(lambda engine: [_ended(engine.add, sequence) for sequence in sequences])
        return stream

    def abort(self, ids: Iterable[int], reason: FinishReason) -> None:
        """End live sequences, with a terminal output to each listener."""
        if live := [i for i in ids if i in self._live]:
            self._inbox.put(lambda engine: [engine.abort(i, reason) for i in live])

    def abort_all(self) -> None:
        """End every sequence with reason ABORT."""
        self.abort(list(self._live), FinishReason.ABORT)

    def abort_waiting(self) -> None:
        """End the requests of which no sequence has had a slot; the others stay whole."""
        streams = dict.fromkeys(live.stream for live in self._live.values())

        def abort(engine: AnyEngine) -> Iterable[TokenOutput | None]:
            waiting = [s for stream in streams if stream.is_waiting for s in stream.sequences]
            return [engine.abort(s.id, FinishReason.ABORT) for s in waiting]

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
                live.stream.queue.put_nowait(end)
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
            if stats is not None:
                self.metrics.step(stats)
                self.forecast.step(stats)
            now = perf_counter()
            for output in outputs:
                live = self._live.get(output.sequence_id)
                if live is not None:  # else adding it raised, and the engine runs it all the same
                    self._hand_out(output, live, now)
        except Exception:
            logger.exception("the engine's outputs are lost")
            self.give_up()

    def _hand_out(self, output: TokenOutput, live: _Live, now: float) -> None:
        if live.cancelled_as is None:
            live.stream.queue.put_nowait(output)
        if output.finish_reason is not None:
            del self._live[output.sequence_id]
        n_tokens = int(output.token_id is not None)
        if isinstance(output, BeamOutput):
            n_tokens = len(live.sequence.output_ids)  # the best text's
        self.metrics.output(live.sequence, live.last_output, now, n_tokens)
        live.last_output = now
        if output.finish_reason is not None:
            self._record_end(live, output.finish_reason)

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
