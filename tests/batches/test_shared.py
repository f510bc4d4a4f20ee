"""Batches of several servers with one Redis and one folder: each line is answered once."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic_core import from_json

from kvasir.server.api.http.upload import Content
from kvasir.server.batches import requests, shared_worker
from kvasir.server.batches.journal import Reply
from kvasir.server.batches.objects import ENDED, StoredBatch
from kvasir.server.batches.shared_store import SharedStore
from kvasir.server.batches.shared_worker import SharedWorker
from kvasir.server.batches.store import WINDOW
from kvasir.server.batches.worker import Answer
from kvasir.server.errors import UnavailableError
from kvasir.server.state import link
from kvasir.server.state.redis_state import RedisState
from tests.kit.batches import ENDPOINT, NOW, check_whole, doubled, lines_of, upload
from tests.kit.fake_runner import TIMEOUT
from tests.kit.redis_server import RedisServer, needs_redis, redis_server

pytestmark = needs_redis

N_LINES = 40


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(started: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    monkeypatch.setattr(link, "_SLICES", 100 * TIMEOUT)  # on a busy machine
    monkeypatch.setattr(requests, "PART", 3)
    monkeypatch.setattr(shared_worker, "_TICK", 0.01)
    monkeypatch.setattr(shared_worker, "_SWEEP_TICKS", 10**9)
    monkeypatch.setattr("kvasir.server.batches.worker._PAUSE", 0.01)
    with redis.Redis.from_url(started.url) as client:
        client.flushall()
    return started


class Member:
    """A server of the fleet: its state, its store and its worker. It answers by doubling."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.state = RedisState(server.url, 0)
        self.store = SharedStore(self.state, folder, max_bytes=10**6)
        self.answered = Counter[int]()
        self.answer: Answer = self.double
        self.now = NOW
        self.worker = SharedWorker(
            *(self.store, self.ask, from_json),
            n_at_once=4,
            max_line=1000,
            count=lambda _: None,
            clock=lambda: self.now,
        )

    async def ask(self, path: str, body: bytes, owner: str) -> Reply | float:
        return await self.answer(path, body, owner)

    async def double(self, path: str, body: bytes, owner: str) -> Reply | float:
        self.answered[from_json(body)["prompt"]] += 1
        return await doubled(path, body, owner)

    def hold(self) -> None:
        """Answer nothing until `goes_on`; `asked` tells that something was asked."""
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.answer = self.double_late

    async def double_late(self, *args: Any) -> Reply | float:
        self.asked.set()
        await self.goes_on.wait()
        return await self.double(*args)

    async def start(self) -> None:
        await self.state.start()
        self.worker.start()

    async def close(self) -> None:
        await self.worker.close()
        await self.state.close()

    async def die(self) -> None:
        """End without a word to Redis: claims stay as they are."""
        self.state._claims.clear()
        await self.close()


Fleet = Callable[[int], Awaitable[list[Member]]]


@pytest.fixture
async def fleet(server: RedisServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    members: list[Member] = []

    async def begin(n: int) -> list[Member]:
        members.extend(new := [Member(server, tmp_path) for _ in range(n)])
        for member in new:
            await member.start()
        return new

    yield begin
    for member in members:
        await member.close()


async def begun(member: Member) -> StoredBatch:
    file = member.store.file(await upload(member.store, N_LINES), "")
    return await member.worker.create(file, ENDPOINT, None)


async def ended(members: list[Member], batch_id: str) -> StoredBatch:
    """Wait until all servers have seen that a batch has ended."""
    for member in members:
        await member.store.refresh()
        while member.store.batches[batch_id].status not in ENDED:
            await member.worker._ticked.wait()
    for member in members:
        if batch_id in member.worker.tasks:
            await member.worker.tasks[batch_id]
    await members[0].store.refresh()
    return members[0].store.batches[batch_id]


async def ends_whole(members: list[Member], batch_id: str) -> None:
    """Wait for the end of a batch, and compare it with what the service answers."""
    check_whole(members[0].store, await ended(members, batch_id), N_LINES)


def expire_claims(server: RedisServer) -> None:
    """Let the leases of all claims end."""
    with redis.Redis.from_url(server.url) as client:
        for key in client.scan_iter("kvasir:work:*", _type="zset"):
            for part in client.zrange(key, 0, -1):
                client.zadd(key, {part: 1})


async def test_servers_share_a_batch_and_answer_each_line_once(fleet: Fleet) -> None:
    members = await fleet(3)
    for member in members:
        member.hold()
    batch = await begun(members[0])
    for member in members:
        await member.asked.wait()
    for member in members:
        member.goes_on.set()
    await ends_whole(members, batch.id)
    total = sum((member.answered for member in members), Counter[int]())
    assert total == Counter(range(N_LINES))
    assert not [*members[0].store.part(batch, "").parent.iterdir()]
    assert all(member.answered for member in members)


@pytest.mark.parametrize("seed", range(3))
async def test_claims_may_end_and_servers_die_at_any_time(
    server: RedisServer, fleet: Fleet, seed: int
) -> None:
    """A server whose claim has ended is slow, not dead, and writes what another one writes, too."""
    chance = random.Random(seed)
    members = await fleet(3)
    for member in members:

        async def answer(*args: Any, member: Member = member) -> Reply | float:
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                expire_claims(server)
            return 0.0 if chance.random() < 0.1 else await member.double(*args)

        member.answer = answer
    batch = await begun(members[0])
    for _ in range(2):
        for _ in range(chance.randrange(30)):
            await members[-1].worker._ticked.wait()
        await members.pop(chance.randrange(len(members))).die()
        expire_claims(server)
        members += await fleet(1)
        await members[-1].store.refresh()
    await ends_whole(members[::-1], batch.id)


async def test_what_a_slow_server_writes_late_counts_no_more(
    server: RedisServer, fleet: Fleet
) -> None:
    (slow,) = await fleet(1)
    slow.hold()
    batch = await begun(slow)
    await slow.asked.wait()
    (fast,) = await fleet(1)
    expire_claims(server)
    await fast.store.refresh()
    while len(fast.answered) < N_LINES:
        expire_claims(server)
        await fast.worker._ticked.wait()
    slow.goes_on.set()
    await ends_whole([slow, fast], batch.id)
    assert fast.answered == Counter(range(N_LINES))
    assert 0 < len(slow.answered) < N_LINES / 2


@pytest.mark.parametrize("work", ["", ":end"])
async def test_who_claims_the_work_of_a_batch_that_has_ended_changes_nothing(
    server: RedisServer,
    fleet: Fleet,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
) -> None:
    (slow,) = await fleet(1)
    claim, claimed, goes_on = slow.state.claim, asyncio.Event(), asyncio.Event()

    async def claim_late(name: str, n_parts: int) -> int | None:
        part = await claim(name, n_parts)
        if part is not None and name.partition(":")[2] == work[1:]:
            claimed.set()
            await goes_on.wait()
        return part

    monkeypatch.setattr(slow.state, "claim", claim_late)
    batch = await begun(slow)
    await claimed.wait()
    (fast,) = await fleet(1)
    expire_claims(server)
    await ends_whole([fast], batch.id)
    await slow.store.refresh()
    goes_on.set()
    await ends_whole([slow, fast], batch.id)
    assert "stopped" not in caplog.text


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
@pytest.mark.parametrize("has_died", [False, True])
async def test_a_batch_that_ends_early_answers_each_line_or_says_why_not(
    server: RedisServer, fleet: Fleet, ending: str, *, has_died: bool
) -> None:
    one, other = await fleet(2)
    batch = await begun(one)
    for member in (one, other):
        member.hold()
    for member in (one, other):
        await member.asked.wait()
    if ending == "cancelled":
        await other.worker.cancel(other.store.batch(batch.id, ""))
    else:
        one.now = other.now = NOW + WINDOW
        for member in (one, other):  # as when their clocks come to it
            member.worker._stop(member.store.batches[batch.id])
    left = [other]
    if has_died:
        await one.die()
        expire_claims(server)
    else:
        left.append(one)
    found = await ended(left, batch.id)
    assert found.status == ending
    output, failures = (
        lines_of(other.store, one) for one in (found.output_file_id, found.error_file_id)
    )
    assert {line["custom_id"] for line in output + failures} == {f"ü{n}" for n in range(N_LINES)}
    assert len(output + failures) == N_LINES
    assert {line["error"] and line["error"]["code"] for line in failures} <= {
        None,
        f"batch_{ending}",
    }
    assert failures


async def test_a_batch_goes_on_after_redis_was_away(server: RedisServer, fleet: Fleet) -> None:
    one, other = await fleet(2)
    for member in (one, other):
        member.hold()
    batch = await begun(one)
    for member in (one, other):
        await member.asked.wait()
    server.stop()
    try:
        for member in (one, other):
            member.goes_on.set()
        for member in (one, other):
            while member.state.is_up:
                await member.worker._ticked.wait()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await one.store.refresh()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await one.worker.cancel(batch)
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await upload(other.store)
        assert batch.status == "in_progress"
    finally:
        server.start()
    for member in (one, other):
        await member.state._link.found.wait()
    await ends_whole([one, other], batch.id)


async def test_a_cancellation_that_fails_cancels_no_line(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis does not say whether it has it, while the batch goes on here."""
    (one,) = await fleet(1)
    one.hold()
    batch = await begun(one)
    await one.asked.wait()
    push, finish, done = one.state.push, one.state.finish, list[int]()
    pushing, fails, is_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> bool:
        pushing.set()
        await fails.wait()
        raise UnavailableError("no reply")

    async def count(work: str, part: int, amounts: Any) -> None:
        await finish(work, part, amounts)
        done.append(part)
        if len(done) == len(batch.parts):
            is_done.set()

    monkeypatch.setattr(one.state, "push", hang)
    monkeypatch.setattr(one.state, "finish", count)
    cancelling = asyncio.create_task(one.worker.cancel(batch))
    await pushing.wait()
    one.goes_on.set()
    await is_done.wait()
    monkeypatch.setattr(one.state, "push", push)
    fails.set()
    with pytest.raises(UnavailableError, match="no reply"):
        await cancelling
    await ends_whole([one], batch.id)


async def test_a_finished_part_that_the_folder_has_lost_is_answered_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its volume was restored: the batch could neither end nor be cancelled."""
    (one,) = await fleet(1)
    publish = one.worker._publish

    async def lose(batch: StoredBatch, part: int) -> Any:
        monkeypatch.setattr(one.worker, "_publish", publish)
        shutil.rmtree(one.store.part(batch, 3))
        return await publish(batch, part)

    monkeypatch.setattr(one.worker, "_publish", lose)
    batch = await begun(one)
    await ends_whole([one], batch.id)
    assert sum(one.answered.values()) == N_LINES + 3


async def test_a_batch_whose_file_is_wrong_fails_on_all_servers(fleet: Fleet) -> None:
    one, other = await fleet(2)
    content = Content(one.store, "")
    await content.hold(3, 3)
    content.write(b"{}\n")
    file = await content.add("a")
    await content.close()
    batch = await one.worker.create(file, ENDPOINT, None)
    found = await ended([other, one], batch.id)
    assert found.status == "failed"
    assert found.errors is not None
    assert found.errors.data[0].line == 1


async def test_a_full_folder_holds_a_batch_up_and_loses_nothing(fleet: Fleet) -> None:
    one, other = await fleet(2)
    more = await upload(one.store, 60)
    batch = await begun(one)
    one.store._max_bytes = other.store._max_bytes = one.store.n_bytes + 50
    while not (one.worker.waiting or other.worker.waiting):
        await one.worker._ticked.wait()
    await other.store.change(lambda: other.store.delete(other.store.file(more, "")))
    await ends_whole([one, other], batch.id)
    assert set(one.answered + other.answered) == {*range(N_LINES)}


async def receiving(member: Member, n_bytes: int) -> Content:
    """Begin an upload that has not ended."""
    content = Content(member.store, "")
    await content.hold(n_bytes, n_bytes)
    content.write(b"a" * n_bytes)
    return content


def end_uploads(server: RedisServer) -> None:
    """Let the leases of all uploads end."""
    with redis.Redis.from_url(server.url) as client:
        for key in client.scan_iter("kvasir:leases:*"):
            for lease in client.zrange(key, 0, -1):
                client.zadd(key, {lease: 1})


def contents_of(member: Member) -> list[Path]:
    return [*member.store.path("").iterdir()]


async def swept(member: Member) -> None:
    for _ in range(2):
        await member.store.refresh()
        await member.store.sweep()
    await member.store.refresh()


async def test_an_upload_to_a_server_that_was_killed_is_removed(
    server: RedisServer, fleet: Fleet
) -> None:
    one, other = await fleet(2)
    content = await receiving(one, 1000)
    slow = await receiving(other, 500)
    await swept(other)
    assert len(contents_of(other)) == 2  # of servers that live
    one.state._leases.clear()
    await one.die()
    end_uploads(server)
    await other.state._renew()
    await swept(other)
    assert [path.stat().st_size for path in contents_of(other)] <= [500]
    assert other.store.n_bytes == 500 + 4096
    assert (await slow.add("a")).bytes == 500
    await slow.close()
    await swept(other)
    assert len(contents_of(other)) == 1
    assert other.store.n_bytes == 500 + 4096
    assert content._file is not None
    content._file.close()


async def test_a_slow_servers_upload_that_was_removed_fails(
    server: RedisServer, fleet: Fleet
) -> None:
    """It was taken for dead, whether its content is gone already or not yet."""
    slow, other = await fleet(2)
    for n_sweeps in (1, 2):
        content = await receiving(slow, 1000)
        end_uploads(server)
        for _ in range(n_sweeps):
            await other.store.refresh()
            await other.store.sweep()
        with pytest.raises(UnavailableError, match="send the file again"):
            await content.hold(10, 10)
        with pytest.raises(UnavailableError, match="send the file again"):
            await content.add("a")
        await content.close()
        await swept(other)
        assert not contents_of(other)
        assert other.store.n_bytes == 0


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_change_of_unknown_outcome_leaves_a_file_whole_or_none(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    """Redis goes away before or after it has it."""
    one, other = await fleet(2)
    push = one.state.push

    async def lose(*args: Any) -> bool:
        monkeypatch.setattr(one.state, "push", push)
        if is_done:
            await push(*args)
        raise UnavailableError("no reply")

    content = await receiving(one, 1000)
    monkeypatch.setattr(one.state, "push", lose)
    with pytest.raises(UnavailableError, match="no reply"):
        await content.add("a")
    await content.close()
    await swept(other)
    assert len(other.store.files) == len(contents_of(other)) == is_done
    file_id = await upload(other.store)
    file = other.store.files[file_id]
    await one.store.refresh()
    monkeypatch.setattr(one.state, "push", lose)
    with pytest.raises(UnavailableError, match="no reply"):
        await one.store.change(lambda: one.store.delete(file))
    assert one.store.path(file.id).exists()
    await swept(other)
    assert len(other.store.files) == len(contents_of(other)) == 1
    assert one.store.path(file.id).exists() is not is_done


async def test_what_dead_and_slow_servers_leave_of_batches_is_removed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = await fleet(1)
    publish, found = one.worker._publish, list[str]()

    async def look(batch: StoredBatch, part: int) -> Any:
        found.extend(path.name for path in one.store.part(batch, "").iterdir())
        return await publish(batch, part)

    monkeypatch.setattr(one.worker, "_publish", look)
    one.hold()
    batch = await begun(one)
    await one.asked.wait()
    dead, unknown = one.store.part(batch, "0.dead"), one.store._batches / "batch_1/0"
    for folder in (dead, unknown):
        folder.mkdir(parents=True)
        (folder / "answers").write_bytes(b"{")
    await swept(one)
    assert (dead / "answers").exists()  # as a slow server's, which may go on
    one.goes_on.set()
    await ends_whole([one], batch.id)
    assert {*found} == {str(number) for number in range(-(-N_LINES // 3))}
    dead.mkdir(parents=True)
    await swept(one)
    assert [*one.store._batches.iterdir()] == [unknown.parent]  # of records that Redis has lost


async def test_a_slow_server_removes_what_it_has_joined_of_a_batch_that_has_ended(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await fleet(2)
    batch_id = ""
    for member in (one, other):

        async def slow(work: Any, *args: Any, record: Any = member.worker._record) -> None:
            if work.__name__ == "end":
                await other.store.refresh()
                cancelled = other.store.batches[batch_id].model_copy().enter("cancelled", NOW)
                await other.store.change(lambda: other.store.save(cancelled))
            await record(work, *args)

        monkeypatch.setattr(member.worker, "_record", slow)
    batch_id = (await begun(one)).id
    await ended([one, other], batch_id)
    assert [path.name for path in contents_of(one)] == [*one.store.files]
    assert len(one.store.files) == 1


async def test_a_server_sweeps_by_itself(
    server: RedisServer, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_worker, "_SWEEP_TICKS", 1)
    dead, living = await fleet(2)
    content = await receiving(dead, 1000)
    dead.state._leases.clear()
    await dead.die()
    end_uploads(server)
    while contents_of(living):
        await living.worker._ticked.wait()
    assert content._file is not None
    content._file.close()
