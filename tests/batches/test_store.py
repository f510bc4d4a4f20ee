"""The folder of batches after crashes: whatever is cut off, each request is answered once."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic_core import from_json

from kvasir.server.batches import worker as batch_worker
from kvasir.server.batches.journal import Journal, Reply
from kvasir.server.batches.objects import StoredBatch
from kvasir.server.batches.requests import MOST_BLANK, Parse, RequestFile
from kvasir.server.batches.store import WINDOW, BatchStore
from kvasir.server.batches.worker import Answer, BatchWorker
from kvasir.server.errors import RequestTooLargeError, StartupError
from tests.kit.batches import (
    ENDPOINT,
    N_LINES,
    NOW,
    check_whole,
    doubled,
    lines_of,
    upload,
)
from tests.kit.fake_runner import TIMEOUT

FIELDS = "custom_id", "method", "url", "body"  # of a line
Open = Callable[[Path], BatchStore]


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Open stores that are closed at the end of the test, whatever it finds."""
    with ExitStack() as stack:

        def opened(folder: Path) -> BatchStore:
            store = BatchStore(folder, max_bytes=10**6)
            stack.callback(store.close)
            return store

        yield opened


async def begun(store: BatchStore, owner: str = "") -> StoredBatch:
    batch = store.create(store.file(await upload(store, owner=owner), owner), ENDPOINT, None, NOW)
    store.save(batch)
    return batch


def worker(
    store: BatchStore,
    answer: Answer = doubled,
    clock: Callable[[], float] = lambda: NOW,
    n_at_once: int = 2,
    parse: Parse = from_json,
) -> BatchWorker:
    return BatchWorker(
        *(store, answer, parse),
        n_at_once=n_at_once,
        max_line=1000,
        count=lambda _: None,
        clock=clock,
    )


async def run_all(working: BatchWorker) -> None:
    working.start()
    await asyncio.gather(*working.tasks.values())


class CrashError(Exception):
    """The end of the process."""


@pytest.mark.parametrize("seed", range(12))
async def test_a_batch_ends_whole_after_crashes_at_any_byte(
    tmp_path: Path, open_store: Open, seed: int
) -> None:
    """Stop after a random number of answers, cut a random end off both files, begin again."""
    chance = random.Random(seed)
    folder = tmp_path / "batches"
    store = open_store(folder)
    batch_id = (await begun(store)).id
    for life in range(4):
        n_left = chance.randrange(8)

        async def answer(path: str, body: bytes, owner: str) -> Reply | float:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                raise CrashError
            return await doubled(path, body, owner)

        working = worker(store, answer)
        working.start()
        await asyncio.gather(*working.tasks.values(), return_exceptions=True)
        store.close()
        batch = store.batches[batch_id]
        if batch.status != "completed":
            for name in (batch.answers, batch.failures):
                path = folder / "files" / name
                content = path.read_bytes() if path.exists() else b""
                kept = content[: chance.randint(0, len(content))]
                path.write_bytes(kept + chance.choice([b"", b"\0\0", b"{}\n", b'{"custom_id":']))
        crashed = tmp_path / str(life)
        shutil.copytree(folder, crashed)
        folder = crashed
        store = open_store(folder)
    await run_all(worker(store))
    check_whole(store, store.batches[batch_id])


async def test_a_crash_between_two_steps_of_the_end_is_mended(
    tmp_path: Path, open_store: Open
) -> None:
    """Copy the folder whenever a description is written; each copy ends as the batch did."""
    store = open_store(tmp_path / "first")
    write = store._write
    copies: list[Path] = []

    def copying(*arguments: Any, reserved: bool) -> None:
        for moment in "before", "after":
            copies.append(tmp_path / f"copy-{len(copies)}")
            if moment == "after":
                write(*arguments, reserved=reserved)
            shutil.copytree(tmp_path / "first", copies[-1])

    batch_id = (await begun(store)).id
    store._write = copying  # type: ignore[assignment,method-assign]
    await run_all(worker(store))
    store.close()
    assert len(copies) >= 8
    for folder in copies:
        again = open_store(folder)
        await run_all(worker(again))
        check_whole(again, again.batches[batch_id])


async def test_a_line_that_the_server_cannot_take_is_tried_again(
    tmp_path: Path, open_store: Open
) -> None:
    refused: set[bytes] = set()

    async def answer(path: str, body: bytes, owner: str) -> Reply | float:
        if body in refused:
            return await doubled(path, body, owner)
        refused.add(body)
        return 0.0

    store = open_store(tmp_path)
    batch_id = (await begun(store)).id
    await run_all(worker(store, answer))
    check_whole(store, store.batches[batch_id])


@pytest.mark.parametrize("answered", [0, 3])
async def test_a_batch_expires_after_its_window(
    tmp_path: Path, open_store: Open, answered: int
) -> None:
    store = open_store(tmp_path)
    batch = await begun(store)
    waiting = asyncio.Event()
    n_left = answered

    async def answer(path: str, body: bytes, owner: str) -> Reply | float:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            waiting.set()
            await asyncio.Event().wait()
        return await doubled(path, body, owner)

    first = worker(store, answer)
    first.start()
    await waiting.wait()
    await first.close()
    assert batch.status == "in_progress"
    await run_all(worker(store, clock=lambda: NOW + WINDOW))
    assert (batch.status, batch.expired_at) == ("expired", NOW + WINDOW)
    failures = lines_of(store, batch.error_file_id)
    assert {line["error"]["code"] for line in failures} == {"batch_expired"}
    both = [*lines_of(store, batch.output_file_id), *failures]
    assert sorted(line["custom_id"] for line in both) == [f"ü{i}" for i in range(7)]
    assert len(failures) == 7 - answered


async def test_batches_take_turns(tmp_path: Path, open_store: Open) -> None:
    """A line ends once both batches ask for its place, which the other one then gets."""
    order: list[str] = []
    asked = [asyncio.Event() for _ in range(2 * N_LINES + 1)]

    class Places(asyncio.Semaphore):
        async def acquire(self) -> Literal[True]:
            next(one for one in asked if not one.is_set()).set()
            await asked[1].wait()
            return await super().acquire()

    async def answer(path: str, body: bytes, owner: str) -> Reply | float:
        order.append(owner)
        await asked[min(len(order) + 1, 2 * N_LINES - 1)].wait()
        return await doubled(path, body, owner)

    store = open_store(tmp_path)
    for owner in ("a", "b"):
        await begun(store, owner)
    working = worker(store, answer)
    working._places = Places(1)
    await run_all(working)
    assert {(*order[::2],), (*order[1::2],)} == {("a",) * 7, ("b",) * 7}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\n" * 10**6, "too_many_blank_lines"),
        (b"\r\n" * 10**6, "too_many_blank_lines"),
        ((b" " * 900 + b"\n") * 1000, "too_many_blank_lines"),
        (b" " * 10**6, "line_too_long"),
        (b"\r" * 10**6, "line_too_long"),
        (b"1\n" * 10**6, "invalid_json_line"),
        (b"\0\n" * 10**6, "invalid_json_line"),
        ("\u2028\n".encode() * 10**6, "invalid_json_line"),
        (b"[" * 900 + b"\n" + b"[" * 10**6, "invalid_json_line"),
        (json.dumps(dict.fromkeys((*FIELDS, "x" * 900), 1)).encode(), "unknown_parameter"),
        (b'{"custom_id":"%b"}\n' % (b"x" * 900) * 1000, "missing_required_parameter"),
        (b"", "empty_file"),
    ],
)
def test_faults_are_few_and_short_whatever_a_file_holds(
    tmp_path: Path, content: bytes, code: str
) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    steps = [*RequestFile(path, [ENDPOINT], from_json, 1000).faults(set())]
    faults = [one for one in steps if one is not None]
    assert faults[0].code == code
    assert len(steps) <= MOST_BLANK + 1
    assert len(faults) <= 100
    assert all(len(one.model_dump_json()) < 1000 for one in faults)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_reading_of_files_stops_when_the_batch_or_the_server_does(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Two batches are in threads, two wait for one."""
    monkeypatch.setattr(batch_worker, "_SLICE", -1)  # each line has a turn of its own
    loop, begins, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    parsed: list[bytes] = []

    def parse(line: bytes) -> Any:
        parsed.append(line)
        loop.call_soon_threadsafe(begins.set)
        assert goes_on.wait(TIMEOUT)
        return from_json(line)

    store = open_store(tmp_path)
    batches = [await begun(store, owner) for owner in (["a"] if is_cancelled else "abcd")]
    working = worker(store, parse=parse)
    working.start()
    await begins.wait()
    stopping = asyncio.create_task(working.cancel(batches[0]) if is_cancelled else working.close())
    await asyncio.sleep(0)
    goes_on.set()
    await stopping
    await asyncio.gather(*working.tasks.values())
    assert {one.status for one in batches} == {"cancelled" if is_cancelled else "validating"}
    assert len(parsed) < (N_LINES if is_cancelled else 3)


async def test_work_in_a_thread_ends_before_its_files_are_closed(
    tmp_path: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begins, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    closed: list[bool] = []

    def sync(journal: Journal) -> None:
        loop.call_soon_threadsafe(begins.set)
        assert goes_on.wait(TIMEOUT)
        closed.extend(file.closed for file in journal._files)

    monkeypatch.setattr(Journal, "sync", sync)
    monkeypatch.setattr("kvasir.server.batches.journal._SYNC_SECONDS", 0)
    store = open_store(tmp_path)
    await begun(store)
    working = worker(store, n_at_once=1)
    working.start()
    await begins.wait()
    closing = asyncio.create_task(working.close())
    for _ in range(20):
        await asyncio.sleep(0)
    goes_on.set()
    await closing
    assert closed == [False, False]


async def test_batches_need_none_of_asyncios_own_threads(tmp_path: Path, open_store: Open) -> None:
    goes_on = threading.Event()
    store = open_store(tmp_path)
    file = store.file(await upload(store), "")
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(goes_on.wait)
        working = worker(store)
        batch = await working.create(file, ENDPOINT, None)
        await working.tasks[batch.id]
        goes_on.set()
    check_whole(store, batch)


def test_each_key_leaves_others_as_much_as_it_has(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path)
    store._is_shared = True
    for owner, share in ("a", 500_000), ("b", 250_000), ("c", 125_000):
        with pytest.raises(RequestTooLargeError, match="left for you"):
            store.take(share + 1, owner)
        store.take(share, owner)
    store.take(-400_000, "a")
    store.take(137_500, "b")


def test_a_folder_has_one_owner(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StartupError, match="another server"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path)
