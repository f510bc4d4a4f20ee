"""The engine from asyncio: one thread owns it, an inbox leads to it, and the event loop is woken once a step.

Each accepted sequence ends in exactly one terminal output: from the engine, or from here when the engine fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter

from server.engine.engine import Engine, StepStats, TokenOutput
from server.engine.sequence import FinishReason, Sequence, SequenceStatus
from server.errors import EngineError
from server.requests.forecast import Backlog, Forecast, Work
from server.telemetry.metrics import Metrics

logger = logging.getLogger("kvasir")

STALL_SECONDS = 120.0  # a step that takes longer means that the engine hangs

_JOIN_SECONDS = 5.0
_IDLE_SECONDS = 10.0

Command = Callable[[Engine], list[TokenOutput]]


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence that has not ended, and all those of its request.

    `left_as`: how its listener ended it, after which nobody listens.
    """

    sequence: Sequence
    request: list[Sequence]
    queue: asyncio.Queue[TokenOutput]
    last_output: float | None = None
    left_as: FinishReason | None = None


class OutputStream:
    """The outputs of one request's sequences. Close it, whatever happens: what still runs for it is aborted."""

    def __init__(
        self, engine: AsyncEngine, ids: list[int], queue: asyncio.Queue[TokenOutput]
    ) -> None:
        self._engine = engine
        self._ids = ids
        self._queue = queue

    async def receive(self) -> list[TokenOutput]:
        """What has come since the last call, at least one output."""
        outputs = [await self._queue.get()]
        while not self._queue.empty():
            outputs.append(self._queue.get_nowait())
        return outputs

    def expire(self) -> None:
        """The deadline has passed: what still runs ends with TIMEOUT, in an output like any other."""
        self._engine.abort(self._ids, FinishReason.TIMEOUT)

    def stop(self, sequence_id: int) -> None:
        """End one sequence that has produced a stop string; it gives no further output."""
        self._engine.leave([sequence_id], FinishReason.STOP)

    def close(self) -> None:
        self._engine.leave(self._ids, FinishReason.ABORT)


class AsyncEngine:
    """Runs an engine in a thread of its own; all methods belong to the event loop's thread.

    Gauges and the heartbeat are read across threads without a lock: they are single values and need not agree.
    """

    def __init__(self) -> None:
        self.metrics = Metrics(self.load)
        self.forecast = Forecast()
        self.failed = False
        self.engine: Engine | None = None
        self._n_ids = 0
        self._live: dict[int, _Live] = {}
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._busy_since: float | None = None  # start of the current step, None while idle

    @property
    def is_healthy(self) -> bool:
        since = self._busy_since
        return not self.failed and (since is None or monotonic() - since < STALL_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether the thread is there still: loading, idle, or in a step."""
        return self._thread is not None and self._thread.is_alive()

    def load(self) -> tuple[float, float, float]:
        """Sequences that hold a row, sequences that wait, share of the key-value memory that is promised."""
        if self.engine is None:
            return 0.0, 0.0, 0.0
        rows = self.engine.kv
        running = len(self.engine.scheduler.held)
        return running, max(0, len(self._live) - running), rows.reserved_tokens / rows.budget_tokens

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have not ended, in the order of their arrival. The engine's thread goes on changing them."""
        return [live.sequence for live in self._live.values()]

    def backlog(self, turn: float) -> Backlog:
        """What stands before a sequence with that turn, once it is submitted."""
        assert self.engine is not None
        now = perf_counter()
        prompts: dict[int, int] = {}  # by identity: samples of one prompt share it
        running: list[Work] = []
        waiting: list[Work] = []
        for sequence in self.sequences:
            is_waiting = sequence.status is SequenceStatus.WAITING
            if is_waiting:
                prompts[id(sequence.prompt_ids)] = len(sequence.prompt_ids)
            if sequence.status is not SequenceStatus.FINISHED and not (
                is_waiting and sequence.queue_key[0] > turn
            ):
                (waiting if is_waiting else running).append(_work(sequence, now))
        n_rows = self.engine.kv.max_num_seqs
        return Backlog(n_rows, running, waiting, sum(prompts.values()))

    async def start(self, build: Callable[[], Engine]) -> None:
        """Start the thread, whose first work is to build the engine; returns when it has, raises what it raised."""
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Engine] = loop.create_future()
        self._loop = loop
        self._thread = threading.Thread(
            target=self._main, args=(build, built), name="engine", daemon=True
        )
        self._thread.start()
        self.engine = await built

    async def stop(self) -> None:
        """End every sequence and the thread, unless it hangs in its step."""
        if self.engine is None or self._thread is None:
            return
        self.abort(list(self._live), FinishReason.ABORT)
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def new_ids(self, n: int) -> int:
        """The first of `n` consecutive sequence ids that nobody else gets."""
        self._n_ids += n
        return self._n_ids - n

    def submit(self, sequences: list[Sequence]) -> OutputStream:
        """Hand over sequences that the door has found to fit. Raises EngineError when the engine has failed."""
        if self.failed:
            raise EngineError("the engine has failed; the server must be restarted")
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._live.update(
            (sequence.id, _Live(sequence, sequences, queue)) for sequence in sequences
        )
        self._inbox.put(lambda engine: _add(engine, sequences))
        return OutputStream(self, [sequence.id for sequence in sequences], queue)

    def abort(self, ids: Iterable[int], reason: FinishReason) -> None:
        """End sequences from here; those that listen get the terminal output."""
        if running := [i for i in ids if i in self._live]:
            self._inbox.put(lambda engine: _abort(engine, running, reason))

    def abort_all(self) -> None:
        self.abort(list(self._live), FinishReason.ABORT)

    def abort_waiting(self) -> None:
        """End the requests of which nothing has begun: to abort one sequence is to end its whole request."""
        live = list(self._live.values())
        self._inbox.put(lambda engine: _abort(engine, _not_begun(live), FinishReason.ABORT))

    def give_up(self) -> None:
        """The engine has failed, or hangs: end every sequence from here, and listen to it no more."""
        self.failed = True
        ended, self._live = list(self._live.values()), {}
        for live in ended:
            if live.left_as is None:
                live.queue.put_nowait(
                    TokenOutput(live.sequence.id, None, finish_reason=FinishReason.ERROR)
                )
        for live in ended:  # only when all have been told
            self._record_end(live, FinishReason.ERROR)
        self._inbox.put(self._stop)

    def leave(self, ids: Iterable[int], reason: FinishReason) -> None:
        """End sequences to which nobody listens any more."""
        left = [i for i in ids if i in self._live and self._live[i].left_as is None]
        for sequence_id in left:
            self._live[sequence_id].left_as = reason
        self.abort(left, reason)

    # In the engine's thread

    def _main(self, build: Callable[[], Engine], built: asyncio.Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:  # a panic in Rust is no Exception
            self._post(
                _resolve, built, error if isinstance(error, Exception) else RuntimeError(str(error))
            )
            return
        self._post(_resolve, built, engine)
        try:
            while not self._stopping:
                self._turn(engine)
        except BaseException:
            logger.exception("the engine failed")
            self._post(self.give_up)

    def _turn(self, engine: Engine) -> None:
        """Obey the inbox, take a step, wake the event loop."""
        outputs = [output for command in self._commands(engine) for output in command(engine)]
        stats = None
        if engine.has_work and not self._stopping:
            self._busy_since = monotonic()
            stepped, stats = engine.step()
            outputs += stepped
        if outputs or stats:
            self._post(self._deliver, outputs, stats)

    def _commands(self, engine: Engine) -> Iterator[Command]:
        if not engine.has_work:
            self._busy_since = None
            yield self._wait(engine)
        while not self._inbox.empty():
            yield self._inbox.get()

    def _wait(self, engine: Engine) -> Command:
        """The next command; the memory of free rows goes back to the operating system when none comes for a while."""
        try:
            return self._inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            engine.release_idle_memory()
            return self._inbox.get()

    def _stop(self, _engine: Engine) -> list[TokenOutput]:
        self._stopping = True
        return []

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed: the process is going, and nobody listens
            self._loop.call_soon_threadsafe(callback, *args)

    # In the event loop's thread again

    def _deliver(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        """Where handing them out fails, the rest is lost: nobody may wait for it."""
        if self.failed:
            return
        try:
            self._hand_out(outputs, stats)
        except Exception:
            logger.exception("the engine's outputs are lost")
            self.give_up()

    def _hand_out(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        if stats is not None:
            assert self.engine is not None
            self.metrics.step(stats)
            self.forecast.step(stats, self.engine.scheduler.chunk_size)
        now = perf_counter()
        for output in outputs:
            live = self._live[output.sequence_id]
            if live.left_as is None:
                live.queue.put_nowait(output)
            if output.finish_reason is not None:
                del self._live[output.sequence_id]
            self._record(live, output, now)

    def _record(self, live: _Live, output: TokenOutput, now: float) -> None:
        if output.token_id is not None:
            self.metrics.tokens()
        if live.last_output is not None and output.token_id is not None:
            self.metrics.next_token(now - live.last_output)
        elif live.last_output is None and live.sequence.n_computed >= len(live.sequence.prompt_ids):
            self.metrics.first_token(live.sequence, now)
        live.last_output = now
        if output.finish_reason is not None:
            self._record_end(live, output.finish_reason)

    def _record_end(self, live: _Live, reason: FinishReason) -> None:
        self.metrics.finished(
            live.sequence, live.left_as or reason, wasted=live.left_as is FinishReason.ABORT
        )
        times = live.sequence.times
        if times.scheduled is not None and times.finished is not None:
            self.forecast.ended(times.finished - times.scheduled)


def _add(engine: Engine, sequences: list[Sequence]) -> list[TokenOutput]:
    for sequence in sequences:
        engine.add(sequence)
    return []


def _abort(engine: Engine, ids: list[int], reason: FinishReason) -> list[TokenOutput]:
    ended = [engine.abort(sequence_id, reason) for sequence_id in ids]
    return [output for output in ended if output is not None]


def _work(sequence: Sequence, now: float) -> Work:
    scheduled = sequence.times.scheduled
    return Work(
        max(0, len(sequence.prompt_ids) - sequence.n_computed),
        sequence.params.max_tokens - len(sequence.output_ids),
        max(0, sequence.n_sure - len(sequence.output_ids)),
        held=0.0 if scheduled is None else now - scheduled,
        left=sequence.deadline - now,
    )


def _not_begun(live: list[_Live]) -> list[int]:
    """Sequences none of whose request holds a row, or has held one."""
    return [
        one.sequence.id
        for one in live
        if all(s.status is SequenceStatus.WAITING for s in one.request)
    ]


def _resolve(future: asyncio.Future[Engine], result: Engine | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
