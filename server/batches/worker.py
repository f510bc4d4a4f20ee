"""The answering of batches: line by line, at the lowest priority, each line once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from time import monotonic, time
from typing import Any, TypeVar, get_args

from kvasir.model.platform.files import in_words
from kvasir.server.batches.journal import Journal, Reply
from kvasir.server.batches.objects import ENDED, Fault, Faults, Status, StoredBatch, StoredFile
from kvasir.server.batches.requests import Parse, RequestFile
from kvasir.server.batches.store import BatchStore
from kvasir.server.batches.threads import in_thread
from kvasir.server.errors import RequestTooLargeError

T = TypeVar("T")

logger = logging.getLogger("kvasir")

_SLICE = 0.02  # seconds of work on files, after which other batches have their turn
_PAUSE = 10.0  # seconds before a batch without room is tried again
_ENDINGS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because the batch was cancelled.",
}
# Answers the body of a request to an endpoint for the API key of a name, or returns the seconds
# after which to try again.
Answer = Callable[[str, bytes, str], Awaitable[Reply | float]]


class BatchWorker:
    """The tasks of unfinished batches, which take turns at `n_at_once` requests.

    A batch whose files cannot be written waits for room and begins again, as after a crash.
    parse: reads the JSON of a line of at most `max_line` bytes. count: told "completed" or "failed"
    for each line. clock: seconds since 1970.
    """

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        parse: Parse,
        *,
        n_at_once: int,
        max_line: int,
        count: Callable[[str], None],
        clock: Callable[[], float] = time,
    ) -> None:
        self.store = store
        self.clock = clock
        self._answer, self._parse, self._max_line, self._counted = answer, parse, max_line, count
        self._places = asyncio.Semaphore(n_at_once)  # fair: batches get places in turn
        self._checking = defaultdict[str, asyncio.Lock](asyncio.Lock)  # a file of each key at once
        self._threads = ThreadPoolExecutor(2, "batches")
        self._is_closed = False
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._limits = defaultdict[str, set[asyncio.Timeout]](set)
        self.waiting: dict[str, int] = {}  # bytes of the answers for which batches have no room

    def start(self) -> None:
        """Go on with the batches that have not ended."""
        for batch in self.store.unfinished:
            self.begin(batch)

    def begin(self, batch: StoredBatch) -> None:
        """Start to answer a batch."""
        task = asyncio.create_task(self._run(batch))
        self.tasks[batch.id] = task
        task.add_done_callback(lambda _: self.tasks.pop(batch.id))

    async def create(
        self, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None
    ) -> StoredBatch:
        """Return a new batch, which has begun. Raises OSError, and the store's errors."""
        batch = self.store.create(file, endpoint, metadata, self.clock())
        try:
            await in_thread(self._threads, self.store.save, batch)
        except BaseException:
            self.store.forget(batch)
            raise
        self.begin(batch)
        self.store.forget_ended(batch.owner)
        return batch

    async def cancel(self, batch: StoredBatch) -> None:
        """End a batch as cancelled, on a full disk too; what is answered stays."""
        batch.enter("cancelling", self.clock())
        self._stop(batch)
        if batch.id not in self.tasks:  # an error has stopped it
            self.begin(batch)
        with suppress(OSError):  # a crash before the end would undo it
            await in_thread(self._threads, self.store.save, batch, reserved=True)

    def _stop(self, batch: StoredBatch) -> None:
        """Answer no more of a batch."""
        for limit in self._limits.get(batch.id, ()):
            if not limit.expired():
                limit.reschedule(0)

    async def close(self) -> None:
        """Stop, and leave unfinished batches to the next start."""
        self._is_closed = True
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def n_pending(self) -> int:
        """The number of requests of valid batches that are not answered."""
        counts = (batch.request_counts for batch in self.store.unfinished)
        return sum(max(0, count.total - count.completed - count.failed) for count in counts)

    @property
    def n_unfinished(self) -> dict[str, int]:
        """The number of batches that have not ended, by status."""
        counts = Counter(batch.status for batch in self.store.unfinished)
        return {status: counts[status] for status in get_args(Status) if status not in ENDED}

    async def _run(self, batch: StoredBatch) -> None:
        try:
            while True:
                failures: list[Exception] = []
                try:
                    await self._attempt(batch)
                except* (OSError, RequestTooLargeError) as group:
                    failures += group.exceptions
                if not failures or self._is_closed:  # an error may hide that the task was cancelled
                    return
                self.waiting.setdefault(batch.id, 0)
                cause = in_words(failures[0])
                batch.errors = _storage_full(f"{cause}; the batch is tried again")
                fields = {"batch": batch.id, "cause": cause}
                logger.warning("a batch waits for room", extra={"fields": fields})
                await asyncio.sleep(_PAUSE)
        except Exception as error:  # the batch goes on at the next start
            if not self._is_closed:  # else there are no threads any more
                logger.exception("the batch %s stopped", batch.id, exc_info=error)
        finally:
            self.waiting.pop(batch.id, None)

    @asynccontextmanager
    async def _until_end(self, batch: StoredBatch) -> AsyncIterator[asyncio.Timeout]:
        """Leave the block when the batch expires or is cancelled."""
        loop, seconds = asyncio.get_running_loop(), batch.expires_at - self.clock()
        limit = asyncio.timeout_at(loop.time() + (0 if batch.cancelling_at else seconds))
        self._limits[batch.id].add(limit)
        try:
            async with limit:
                yield limit
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limits[batch.id].remove(limit)
            if not self._limits[batch.id]:
                del self._limits[batch.id]

    async def _next(self, steps: Iterator[T | None]) -> T | None:
        """Return the next result of an iterator, or None at its end.

        It has a thread for a slice of time at once, because a file may take seconds.
        """

        def run() -> tuple[T | None, bool]:
            end = monotonic() + _SLICE
            for step in steps:
                if step is not None or monotonic() > end:
                    return step, False
            return None, True

        while True:
            result, is_over = await in_thread(self._threads, run)
            if result is not None or is_over:
                return result

    async def _attempt(self, batch: StoredBatch) -> None:
        """Bring a batch to its end. Raises OSError and RequestTooLargeError, also as a group."""
        async with self._until_end(batch):
            await self._wait_for_room(batch)
            if batch.in_progress_at is None:
                await self._validate(batch)
        if batch.status in ENDED:
            return
        batch.errors = None
        journal = Journal.of(self.store, batch)
        try:
            ending: Status = "cancelled" if batch.cancelling_at else "expired"
            if batch.in_progress_at is not None:
                await self._next(journal.read())
                batch.request_counts, batch.usage = journal.counts, journal.usage
                requests = self._requests(batch)
                ending = await self._answer_all(batch, journal, requests)
                if ending == "completed":
                    batch.enter("finalizing", self.clock())
                else:
                    await self._next(self._leave_out(batch, journal, requests, ending))
                await in_thread(self._threads, journal.publish, self.store, batch, self.clock())
            await in_thread(self._threads, self._end, batch, ending)
        finally:
            journal.close()

    async def _wait_for_room(self, batch: StoredBatch) -> None:
        while (n_bytes := self.waiting.get(batch.id)) is not None:
            if await in_thread(self._threads, self.store.has_room, n_bytes, batch.owner):
                del self.waiting[batch.id]
            else:
                await asyncio.sleep(_PAUSE)

    async def _validate(self, batch: StoredBatch) -> None:
        """Check each line of a batch's file; let the batch go on, or end it as failed."""
        seen: set[int] = set()
        faults, requests = list[Fault](), self._requests(batch)
        async with self._checking[batch.owner]:
            steps = requests.faults(seen)
            while (fault := await self._next(steps)) is not None:
                faults.append(fault)
        await self._record(self._checked, batch, len(seen), faults, requests.parts)

    async def _record(self, work: Callable[..., None], *args: Any) -> None:
        await in_thread(self._threads, work, *args)

    def _checked(
        self, batch: StoredBatch, n_requests: int, faults: list[Fault], _parts: list[int]
    ) -> None:
        batch.request_counts.total = n_requests
        if faults:
            self._end(batch, "failed", Faults(data=faults))
        elif batch.status == "validating":
            batch.enter("in_progress", self.clock())
            self.store.save(batch)

    def _requests(self, batch: StoredBatch) -> RequestFile:
        path = self.store.path(batch.input_file_id)
        return RequestFile(path, [batch.endpoint], self._parse, self._max_line)

    async def _answer_all(
        self, batch: StoredBatch, journal: Journal, requests: RequestFile
    ) -> Status:
        """Answer what is not answered, until the batch expires or is cancelled; return its end."""
        lines = requests.unanswered(journal.answered)
        async with self._until_end(batch) as limit, asyncio.TaskGroup() as group:
            while (line := await self._next(lines)) is not None:
                await self._places.acquire()
                task = group.create_task(self._answer_line(batch, *line, journal))
                task.add_done_callback(lambda _: self._places.release())
        if batch.cancelling_at:
            return "cancelled"
        return "expired" if limit.expired() else "completed"

    async def _answer_line(
        self, batch: StoredBatch, custom_id: str, url: str, body: bytes, journal: Journal
    ) -> None:
        """Answer a line, as often as it takes. Raises OSError and RequestTooLargeError."""
        reply = await self._answer(url, body, batch.owner)
        while not isinstance(reply, Reply):
            await asyncio.sleep(reply)
            reply = await self._answer(url, body, batch.owner)
        try:
            journal.append(custom_id, reply)
        except (OSError, RequestTooLargeError):
            self.waiting[batch.id] = len(reply.body)
            raise
        self._counted("failed" if reply.status_code >= 400 else "completed")
        if journal.is_due:
            await in_thread(self._threads, journal.sync)

    def _leave_out(
        self, batch: StoredBatch, journal: Journal, requests: RequestFile, ending: Status
    ) -> Iterator[None]:
        """Give each line without an answer an error, as far as there is room, one in a step."""
        try:
            for line in requests.unanswered(journal.answered):
                if line is not None:
                    journal.leave_out(line[0], f"batch_{ending}", _ENDINGS[ending])
                    self._counted("failed")
                yield
        except (OSError, RequestTooLargeError) as error:
            lack = "the error file lacks requests that were not executed"
            batch.errors = _storage_full(f"{in_words(error)}; {lack}")

    def _end(self, batch: StoredBatch, ending: Status, faults: Faults | None = None) -> None:
        """End a batch on the disk, and only then here: until then its files are needed."""
        update = {"errors": faults or batch.errors}
        ended = batch.model_copy(update=update).enter(ending, self.clock())
        self.store.save(ended, reserved=True)
        fields = {"batch": batch.id, "status": ending, **batch.request_counts.model_dump()}
        logger.info("a batch has ended", extra={"fields": fields})


def _storage_full(message: str) -> Faults:
    return Faults(data=[Fault(code="storage_full", message=message)])
