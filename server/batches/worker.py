"""The answering of batches: line by line, at the lowest priority, each line once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from time import sleep, time
from typing import Any, get_args

from model.files import in_words
from server.batches.journal import Journal, Reply
from server.batches.objects import ENDED, Fault, Faults, Status, StoredBatch
from server.batches.store import BatchStore
from server.errors import RequestTooLargeError

logger = logging.getLogger("kvasir")

MAX_REQUESTS = 50_000  # of a batch, as OpenAI has it
_MAX_FAULTS = 100  # that are reported
_MAX_ID = 512  # characters of a custom id
_FIELDS = {"custom_id", "method", "url", "body"}
_ENDINGS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because the batch was cancelled.",
    "failed": "This request was not executed, because there was no room for its answer.",
}


# Answers the body of a request to an endpoint for the API key of a name, or returns the seconds
# after which to try again.
Answer = Callable[[str, bytes, str], Awaitable[Reply | float]]
Parse = Callable[[bytes], Any]  # raises ValueError, or an error of the tree


class BatchWorker:
    """The tasks of unfinished batches, which take turns at `n_at_once` requests.

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
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._limits: dict[str, asyncio.Timeout] = {}
        self.waiting: dict[str, int] = {}  # the bytes for which a batch waits for room, by its id

    def start(self) -> None:
        """Go on with the batches that have not ended."""
        for batch in self.store.unfinished:
            self.begin(batch)

    def begin(self, batch: StoredBatch) -> None:
        """Start to answer a batch."""
        task = asyncio.create_task(self._run(batch))
        self.tasks[batch.id] = task
        task.add_done_callback(lambda _: self.tasks.pop(batch.id))

    def cancel(self, batch: StoredBatch) -> None:
        """End a batch, as cancelled if the caller has marked it so; what is answered stays."""
        limit = self._limits.get(batch.id)
        if limit is not None and not limit.expired():
            limit.reschedule(0)

    async def close(self) -> None:
        """Stop, and leave unfinished batches to the next start."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def n_pending(self) -> int:
        """The number of requests of valid batches that are not answered."""
        counts = (batch.request_counts for batch in self.store.unfinished)
        return sum(max(0, one.total - one.completed - one.failed) for one in counts)

    @property
    def n_unfinished(self) -> dict[str, int]:
        """The number of batches that have not ended, by status."""
        found = Counter(batch.status for batch in self.store.unfinished)
        return {status: found[status] for status in get_args(Status) if status not in ENDED}

    async def _run(self, batch: StoredBatch) -> None:
        try:
            if batch.in_progress_at is None and not await self._validate(batch):
                return
            journal = await asyncio.to_thread(Journal, self.store, batch)
            try:
                await self._finish(batch, journal)
            finally:
                journal.close()
        except Exception as error:  # the batch goes on at the next start
            logger.exception("the batch %s stopped", batch.id, exc_info=error)

    async def _validate(self, batch: StoredBatch) -> bool:
        """Check each line, and return whether the batch may go on."""
        faults, total = await asyncio.to_thread(self._faults, batch)
        batch.request_counts.total = total
        if faults:
            batch.errors = Faults(data=faults)
            self._end(batch, "failed")
        elif batch.status == "validating":
            batch.enter("in_progress", self.clock())
        await asyncio.to_thread(self.store.save, batch)
        return not faults

    def _faults(self, batch: StoredBatch) -> tuple[list[Fault], int]:
        """Return what is wrong in a batch's file, and the number of its lines."""
        faults: list[Fault] = []
        seen: set[str] = set()
        for number, raw in self._lines(batch):
            fault = self._fault(batch, raw, seen)
            if fault is not None:
                faults.append(fault.model_copy(update={"line": number}))
            if len(seen) > MAX_REQUESTS or len(faults) == _MAX_FAULTS:
                break
            sleep(0)  # release the interpreter's lock, for which streams would wait 5 ms
        if len(seen) > MAX_REQUESTS:
            message = f"A batch may have at most {MAX_REQUESTS} requests."
            faults.insert(0, Fault(code="too_many_requests", message=message))
        if not seen and not faults:
            faults.append(Fault(code="empty_file", message="The file has no requests."))
        return faults, len(seen)

    def _lines(self, batch: StoredBatch) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a batch's file that are not blank, with their numbers from 1 on."""
        with self.store.path(batch.input_file_id).open("rb") as file:
            number = 0
            while raw := file.readline(self._max_line + 1):
                number += 1
                if not raw.isspace():
                    yield number, raw
                while len(raw) > self._max_line and not raw.endswith(b"\n"):
                    raw = file.readline(self._max_line + 1)

    def _fault(self, batch: StoredBatch, raw: bytes, seen: set[str]) -> Fault | None:
        """Return what is wrong with a line; `seen` are the custom ids before it."""
        if len(raw) > self._max_line:
            message = f"This line has more than {self._max_line} bytes."
            return Fault(code="line_too_long", message=message)
        try:
            line = self._parse(raw)
        except Exception as error:
            message = f"This line is not parseable as valid JSON: {error}"
            return Fault(code="invalid_json_line", message=message)
        if not isinstance(line, dict):
            return Fault(code="invalid_json_line", message="This line is not a JSON object.")
        custom_id, body = line.get("custom_id"), line.get("body")
        wrong: tuple[str, str, str] | None = None
        if missing := sorted(_FIELDS - line.keys()):
            wrong = "missing_required_parameter", f"This line lacks {missing[0]}.", missing[0]
        elif unknown := sorted(line.keys() - _FIELDS):
            wrong = (
                "unknown_parameter",
                f"This line has the unknown field {unknown[0]}.",
                unknown[0],
            )
        elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID:
            message = f"custom_id must be a string of 1 to {_MAX_ID} characters."
            wrong = "invalid_custom_id", message, "custom_id"
        elif custom_id in seen:
            message = f"The custom_id {custom_id!r} is used by an earlier line."
            wrong = "duplicate_custom_id", message, "custom_id"
        elif line["method"] != "POST":
            wrong = "invalid_method", "The method must be POST.", "method"
        elif line["url"] != batch.endpoint:
            message = f"The url must be the batch's endpoint, {batch.endpoint}."
            wrong = "mismatched_endpoint", message, "url"
        elif not isinstance(body, dict):
            wrong = "invalid_body", "The body must be a JSON object.", "body"
        elif body.get("stream"):
            wrong = "invalid_body", "Answers of a batch cannot be streamed.", "body.stream"
        if isinstance(custom_id, str):
            seen.add(custom_id)
        return None if wrong is None else Fault(code=wrong[0], message=wrong[1], param=wrong[2])

    async def _finish(self, batch: StoredBatch, journal: Journal) -> None:
        """Answer the lines that are not answered, until the batch expires or is cancelled."""
        batch.request_counts, batch.usage = journal.counts, journal.usage
        loop, seconds = asyncio.get_running_loop(), batch.expires_at - self.clock()
        limit = asyncio.timeout_at(loop.time() + (0 if batch.cancelling_at else seconds))
        self._limits[batch.id] = limit
        failures: list[Exception] = []
        try:
            async with limit:
                await self._answer_all(batch, journal, failures)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            del self._limits[batch.id]
        ending: Status = "completed"
        if batch.cancelling_at:
            ending = "cancelled"
        elif failures:
            batch.errors = Faults(data=[Fault(code="storage_full", message=in_words(failures[0]))])
            ending = "failed"
        elif limit.expired():
            ending = "expired"
        if ending == "completed":
            batch.enter("finalizing", self.clock())
            await asyncio.to_thread(self.store.save, batch)
        await asyncio.to_thread(self._close_batch, batch, journal, ending)

    async def _answer_all(
        self, batch: StoredBatch, journal: Journal, failures: list[Exception]
    ) -> None:
        lines = self._unanswered(batch, journal)
        async with asyncio.TaskGroup() as group:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                await self._places.acquire()
                task = group.create_task(self._answer_line(batch, *line, journal, failures))
                task.add_done_callback(lambda _: self._places.release())

    def _unanswered(self, batch: StoredBatch, journal: Journal) -> Iterator[tuple[str, bytes]]:
        """Yield the custom id and the body of each line without an answer."""
        for _, raw in self._lines(batch):
            line = self._parse(raw)
            if line["custom_id"] not in journal.answered:
                yield line["custom_id"], json.dumps(line["body"]).encode()

    async def _answer_line(
        self,
        batch: StoredBatch,
        custom_id: str,
        body: bytes,
        journal: Journal,
        failures: list[Exception],
    ) -> None:
        """Answer a line, as often as it takes; what the server cannot write down ends the batch."""
        reply = await self._answer(batch.endpoint, body, batch.owner)
        while not isinstance(reply, Reply):
            await asyncio.sleep(reply)
            reply = await self._answer(batch.endpoint, body, batch.owner)
        try:
            journal.append(custom_id, reply)
            self._counted("failed" if reply.status_code >= 400 else "completed")
            if journal.is_due:
                await asyncio.to_thread(journal.sync)
        except (OSError, RequestTooLargeError) as error:
            failures.append(error)
            self.cancel(batch)

    def _close_batch(self, batch: StoredBatch, journal: Journal, ending: Status) -> None:
        """Give the rest of the lines an error, make files of the answers, and end the batch."""
        if ending != "completed":
            code = f"batch_{ending}"
            with suppress(OSError, RequestTooLargeError):
                for custom_id, _ in self._unanswered(batch, journal):
                    journal.leave_out(custom_id, code, _ENDINGS[ending])
                    self._counted("failed")
        journal.publish(self.clock())
        self._end(batch, ending)
        self.store.save(batch)

    def _end(self, batch: StoredBatch, ending: Status) -> None:
        counts = batch.enter(ending, self.clock()).request_counts
        fields = {"batch": batch.id, "status": ending, **counts.model_dump()}
        logger.info("a batch has ended", extra={"fields": fields})
