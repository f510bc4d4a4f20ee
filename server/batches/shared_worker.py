"""The answering of batches by several servers, each of which claims parts of them.

The answers to a part are a folder that appears by one renaming: if two servers answer the same,
since the claim of the slow one has ended, only one folder counts. All join the same parts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from kvasir.model.platform.files import sync
from kvasir.server.batches.journal import Journal
from kvasir.server.batches.objects import ENDED, Fault, Status, StoredBatch, StoredFile
from kvasir.server.batches.shared_store import SharedStore
from kvasir.server.batches.threads import in_thread
from kvasir.server.batches.worker import BatchWorker
from kvasir.server.errors import UnavailableError

T = TypeVar("T")
Amounts = Mapping[str, int]

logger = logging.getLogger("kvasir")

_TICK = 1.0  # seconds between two looks at what other servers have done
_SWEEP_TICKS = 15  # between two sweeps, in which Redis was there: no shorter than a lease
_LANES = 4  # parts of a batch at once: the end of one overlaps with others
_NAMES = "answers", "failures"  # of a part's files


class SharedWorker(BatchWorker):
    """Answers batches as one of several servers, which claim parts of them."""

    store: SharedStore

    def __init__(self, store: SharedStore, *args: Any, **kwargs: Any) -> None:
        super().__init__(store, *args, **kwargs)
        self._name = token_hex(4)  # of folders that are not yet whole
        self._ticked = asyncio.Event()

    def start(self) -> None:
        """Take part in the batches that have not ended, and in those to come."""
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop, and leave unfinished batches to other servers or to the next start."""
        self._ticking.cancel()
        await super().close()

    async def _tick(self) -> None:
        n_ticks = 0
        while True:
            try:
                await self.store.refresh()
                for batch in self.store.unfinished:
                    if batch.id not in self.tasks:
                        self.begin(batch)
                    elif batch.cancelling_at:
                        self._stop(batch)
                n_ticks += 1
                if n_ticks % _SWEEP_TICKS == 0:
                    await self.store.sweep()
            except UnavailableError:  # others could not renew their leases either
                n_ticks = 0
            except Exception:
                logger.exception("the batches of all servers cannot be read")
            self._ticked.set()
            self._ticked = asyncio.Event()
            await asyncio.sleep(_TICK)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what the shared state replies, however long it is away."""
        while True:
            try:
                return await ask()
            except UnavailableError:
                await self._ticked.wait()

    async def create(
        self, file: StoredFile, endpoint: str, metadata: Mapping[str, str] | None
    ) -> StoredBatch:
        """See BatchWorker. Raises UnavailableError, too."""

        def work() -> StoredBatch:
            present = self.store.file(file.id, file.owner)
            self.store.save(batch := self.store.create(present, endpoint, metadata, self.clock()))
            self.store.forget_ended(batch.owner)
            return batch

        batch = await self.store.change(work)
        self.begin(batch)
        return batch

    async def cancel(self, batch: StoredBatch) -> None:
        """See BatchWorker. Raises UnavailableError."""

        def work() -> None:
            if batch.status not in ENDED:
                self.store.save(batch.model_copy().enter("cancelling", self.clock()))

        await self.store.change(work)
        self._stop(batch)

    async def _record(self, work: Callable[..., None], *args: Any) -> None:
        await self._patiently(partial(self.store.change, partial(work, *args)))

    async def _attempt(self, batch: StoredBatch) -> None:
        """See BatchWorker. It returns when the batch has ended, whoever ends it."""
        async with self._until_end(batch):
            await self._wait_for_room(batch)
        try:
            await self._take_part(batch)
        except* OSError:
            await self._patiently(self.store.refresh)
            if self._is_open(batch):  # else its parts are there no more
                raise

    async def _take_part(self, batch: StoredBatch) -> None:
        while self._is_open(batch):
            batch.errors = None
            if batch.in_progress_at is None and not batch.cancelling_at:
                done_here = await self._do(f"{batch.id}:check", 1, partial(self._check, batch))
            else:
                async with asyncio.TaskGroup() as lanes:
                    for _ in range(_LANES):
                        lanes.create_task(self._answer_parts(batch))
                ask = partial(self.store.state.progress, [batch.id])
                (done,) = await self._patiently(ask)
                done_here = done["finished"] >= len(batch.parts) and await self._do(
                    f"{batch.id}:end", 1, partial(self._publish, batch)
                )
            if not done_here:
                await self._ticked.wait()

    def _is_open(self, batch: StoredBatch) -> bool:
        return batch.status not in ENDED and batch.id in self.store.batches

    async def _do(self, work: str, n_parts: int, do: Callable[[int], Awaitable[Amounts]]) -> bool:
        """Do a part of a work that nobody does or has done; return False if there is none."""
        state = self.store.state
        part = await self._patiently(partial(state.claim, work, n_parts))
        if part is None:
            return False
        try:
            amounts = await do(part)
            await self._patiently(partial(state.finish, work, part, amounts))
        finally:
            state.run(state.release(work, part))
        return True

    async def _check(self, batch: StoredBatch, _part: int) -> Amounts:
        await self._validate(batch)
        return {}

    def _checked(
        self, batch: StoredBatch, n_requests: int, faults: list[Fault], parts: list[int]
    ) -> None:
        checked = batch.model_copy(update={"parts": parts})  # for the store's `save`
        super()._checked(checked, n_requests, faults, parts)

    async def _answer_parts(self, batch: StoredBatch) -> None:
        answer = partial(self._answer_part, batch)
        while self._is_open(batch) and await self._do(batch.id, len(batch.parts), answer):
            pass

    async def _answer_part(self, batch: StoredBatch, number: int) -> Amounts:
        """Answer a part, unless that has been done, and return its amounts."""
        if not self._is_open(batch):  # since the part was claimed
            return {}
        folder, ends = self.store.part(batch, number), [*batch.parts[1:], None]
        span = batch.parts[number], ends[number]
        if not await in_thread(self._threads, folder.exists):
            begun = folder.with_name(f"{number}.{self._name}")  # of an earlier attempt, perhaps
            await in_thread(self._threads, begun.mkdir, parents=True, exist_ok=True)
            await self._write_part(batch, span, begun)
            await in_thread(self._threads, _place, begun, folder)
        journal = Journal(_paths(folder), 0)
        try:
            await self._next(journal.read())
        finally:
            journal.close()
        n_bytes = sum(path.stat().st_size for path in _paths(folder))
        counts = journal.counts
        return {"completed": counts.completed, "failed": counts.failed, "bytes": n_bytes}

    async def _write_part(
        self, batch: StoredBatch, span: tuple[int, int | None], folder: Path
    ) -> None:
        requests = self._requests(batch)
        requests.span = span
        journal = Journal(_paths(folder), 0, partial(self.store.take, owner=batch.owner))
        try:
            await self._next(journal.read())
            ending = await self._answer_all(batch, journal, requests)
            if ending != "completed":
                await self._next(self._leave_out(batch, journal, requests, ending))
            await in_thread(self._threads, journal.sync)
        finally:
            journal.close()

    async def _publish(self, batch: StoredBatch, _part: int) -> Amounts:
        """Make files of all parts, and end the batch, unless it has ended since it was claimed.

        The files get their names only while it has not: later they are what clients have seen.
        """
        if not self._is_open(batch):
            return {}
        folders = [self.store.part(batch, number) for number in range(len(batch.parts))]
        for number, folder in enumerate(folders):
            if not await in_thread(self._threads, folder.exists):  # lost after it was finished
                await self._answer_part(batch, number)
        joined = [self.store.part(batch, f"{self._name}.{name}") for name in _NAMES]
        file_ids = batch.answers, batch.failures
        for name, written in zip(_NAMES, joined, strict=True):
            paths = [folder / name for folder in folders]
            await in_thread(self._threads, _join, paths, written)
        journal = Journal(joined, batch.request_counts.total)

        def end() -> None:
            if not self._is_open(batch):
                for file_id in set(file_ids) - self.store.files.keys():
                    self.store.discard(file_id, batch.owner)
                return
            for written, file_id in zip(joined, file_ids, strict=True):
                if written.exists():  # else this is done again, since others changed something
                    written.rename(self.store.path(file_id))
            now = self.clock()
            ending: Status = "expired" if now >= batch.expires_at else "completed"
            if batch.cancelling_at:
                ending = "cancelled"
            elif ending == "completed":
                batch.enter("finalizing", now)
            batch.parts, batch.request_counts, batch.usage = [], journal.counts, journal.usage
            journal.publish(self.store, batch, now)
            self._end(batch, ending)

        try:
            await self._next(journal.read())
            await self._record(end)
        finally:
            journal.close()
        folder = self.store.part(batch, "")
        await in_thread(self._threads, shutil.rmtree, folder, ignore_errors=True)
        return {}


def _paths(folder: Path) -> list[Path]:
    return [folder / name for name in _NAMES]


def _place(begun: Path, folder: Path) -> None:
    """Rename a folder, unless another server was faster; remove others. Raises OSError."""
    try:
        begun.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    sync(folder.parent)
    for late in folder.parent.glob(f"{folder.name}.*"):  # of dead servers, and of slow ones
        shutil.rmtree(late, ignore_errors=True)


def _join(paths: Sequence[Path], written: Path) -> None:
    """Write a file of the contents of others. Raises OSError."""
    written.parent.mkdir(exist_ok=True)  # a batch that is cancelled early has none
    with written.open("wb") as file:
        for path in paths:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)
        os.fsync(file.fileno())
