"""What is of Redis alone: a dead replica, questions between replicas, and Redis itself away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from kvasir.server.errors import StartupError, UnavailableError
from kvasir.server.requests.admission.callers import Caller
from kvasir.server.state import link
from kvasir.server.state.redis_state import LEASE_SECONDS, RedisState
from kvasir.server.state.state import Key, Question, Stored
from tests.kit.fake_runner import TIMEOUT
from tests.kit.redis_server import RedisServer, needs_redis
from tests.state.conftest import RedisFleet

pytestmark = needs_redis

ACCOUNT = b"\x01" * 16
KEY = (ACCOUNT, "resp_1")
STORED = Stored(b"response", b"items", b"output")


class Streamed:
    """Stands for a formatter."""


async def test_the_requests_of_a_dead_replica_no_longer_count(replicas: RedisFleet) -> None:
    first, second = replicas.both
    leases = [await replica.enter(ACCOUNT, 3) for replica in (first, first, second)]
    assert None not in leases
    assert await second.enter(ACCOUNT, 3) is None
    replicas.advance(LEASE_SECONDS - 1)
    await second._renew()  # and the first does not
    replicas.advance(2)
    again = [await second.enter(ACCOUNT, 3) for _ in range(3)]
    assert [lease is not None for lease in again] == [True, True, False]


async def test_a_replica_answers_for_what_it_streams(replicas: RedisFleet) -> None:
    first, second = replicas.both
    asked: list[tuple[Question, Key]] = []

    async def answer(question: Question, key: Key) -> bytes | None:
        asked.append((question, key))
        return b"so far" if len(asked) < 3 else None

    first.answer = answer
    formatter = Streamed()
    assert await second.ask("get", KEY) is None
    await first.announce(KEY, formatter)
    assert await second.ask("get", (b"\x02" * 16, KEY[1])) is None
    assert await second.ask("get", KEY) == b"so far"
    assert await second.ask("cancel", KEY) == b"so far"
    assert await second.ask("get", KEY) is None  # it has ended
    assert asked == [("get", KEY), ("cancel", KEY), ("get", KEY)]
    assert await first.ask("get", KEY) is None  # it knows its own
    await first.close()
    assert await second.ask("get", KEY) is None


@pytest.mark.parametrize("hangs", [False, True])
async def test_nothing_is_lost_while_redis_is_away(
    server: RedisServer, replicas: RedisFleet, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    first, second = replicas.both
    before = await first.take(ACCOUNT, 1000, 900)
    lease = await first.enter(ACCOUNT, 2)
    assert lease is not None
    monkeypatch.setattr(link, "_SLICES", 5)
    server.pause(paused=True) if hangs else server.stop()
    try:
        for used in (0, 700):
            assert (await first.take(ACCOUNT, 1000, 700)).n_used == pytest.approx(used, abs=100)
        assert (await first.take(ACCOUNT, 1000, 1)).n_used > 1000  # the limit is its own now
        await first.give_back(ACCOUNT, before, 900)
        assert await first.enter(ACCOUNT, 2) is not None
        assert await first.enter(ACCOUNT, 2) is None
        assert not first.is_up
        await first.put(KEY, STORED)
        assert await first.get(KEY) == STORED
        for asking in (second.get(KEY), second.pop(KEY), second.ask("get", KEY)):
            with pytest.raises(UnavailableError, match="cannot be reached"):
                await asking
    finally:
        server.pause(paused=False) if hangs else server.start()
    monkeypatch.setattr(link, "_SLICES", 1000)
    for replica in (first, second):
        await replica._link.found.wait()
    assert await second.get(KEY) == STORED
    assert not first._local.responses
    # What the one that hung had received is counted there, too, until a minute has forgotten it.
    counted = 700 if hangs else 0
    assert (await second.take(ACCOUNT, 1000, 1)).n_used == pytest.approx(counted, abs=100)
    await first._renew()
    assert await second.enter(ACCOUNT, 2) is None
    await first.leave(ACCOUNT, lease)
    assert await second.enter(ACCOUNT, 2) is not None


async def test_a_server_ends_while_redis_goes_away(server: RedisServer) -> None:
    """Whichever of both comes first, no task goes on."""
    with redis.Redis.from_url(server.url) as client:
        for n_turns in range(30):
            state = RedisState(server.url, 0)
            await state.start()
            client.client_kill_filter(_type="pubsub" if n_turns % 2 else "normal", skipme=True)
            for _ in range(n_turns // 2):
                await asyncio.sleep(0)
            await state.close()
            assert not state._tasks


async def test_a_restart_without_data_knows_the_scripts_again(
    server: RedisServer, replicas: RedisFleet
) -> None:
    first, _ = replicas.both
    assert (await first.take(ACCOUNT, 1000, 900)).n_used == 0
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.script_flush()
    assert (await first.take(ACCOUNT, 1000, 900)).n_used == 0
    assert first.is_up


async def test_responses_are_stored_after_redis_has_dropped_a_part_of_them(
    server: RedisServer, replicas: RedisFleet
) -> None:
    """As other policies than noeviction do: no script may run forever, or fail forever."""
    first, second = replicas.both
    first.max_responses = 3
    kept = "kvasir:responses"
    parts = "sizes", "all", "bytes", "count", f"of:{ACCOUNT.hex()}"
    with redis.Redis.from_url(server.url) as client:
        for dropped in (kept, *(f"{kept}:{part}" for part in parts)):
            client.flushall()
            for i in range(3):
                await first.put((ACCOUNT, f"resp_{i}"), STORED)
            assert client.delete(dropped) == 1
            for i in range(3, 10):
                key = ACCOUNT, f"resp_{i}"
                await first.put(key, STORED)
                assert first.is_up
                assert await second.get(key) == STORED
            assert client.hlen(kept) == 3


async def test_a_redis_that_refuses_commands_is_not_asked_again_at_once(
    server: RedisServer, replicas: RedisFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each request would make and log a loss, such as while its memory is full."""
    monkeypatch.setattr(link, "_RETRY_SECONDS", TIMEOUT)
    first, second = replicas.both
    with redis.Redis.from_url(server.url) as client:
        client.set(f"kvasir:tokens:{ACCOUNT.hex()}", "of another application")
    assert (await first.take(ACCOUNT, 1000, 1)).is_local
    for _ in range(100):
        assert not (await second.take(b"other", 1000, 1)).is_local
    assert not first.is_up


async def test_a_long_id_is_not_sent(server: RedisServer, replicas: RedisFleet) -> None:
    """Clients may make one of megabytes, for which all keys would wait."""
    key = ACCOUNT, "resp_1" + 10**6 * "0"
    first, _ = replicas.both
    with redis.Redis.from_url(server.url) as client:
        before = client.info("stats")["total_net_input_bytes"]
        assert await first.get(key) is None
        assert await first.ask("get", key) is None
        assert not await first.pop(key)
        assert client.info("stats")["total_net_input_bytes"] - before < 10**5


async def test_who_leaves_while_tokens_are_taken_gives_them_back(replicas: RedisFleet) -> None:
    first, second = replicas.both
    caller = Caller("a", concurrency=1, tokens_per_minute=1000, state=first, account=ACCOUNT)

    async def ask() -> None:
        async with caller.request(lambda: 1), caller.tokens(1000):
            await asyncio.Event().wait()

    for n_turns in range(20):
        asking = asyncio.ensure_future(ask())
        for _ in range(n_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert (await second.take(ACCOUNT, 1000, 1)).n_used == 0
    assert await second.enter(ACCOUNT, 1) is not None


@pytest.mark.parametrize(
    "url", ["localhost:6379", "redis://:secret#word@host/0", "redis://host/0?secret=1"]
)
def test_an_address_that_is_none_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(StartupError, match="setting state_url: it must be") as caught:
        RedisState(url, 0)
    assert "secret" not in str(caught.value)


async def test_of_racing_changes_to_records_one_happens(
    server: RedisServer, replicas: RedisFleet
) -> None:
    first, second = replicas.both
    assert await first.pull(-1) == (0, True, {})
    pushed = await asyncio.gather(
        *((first, second)[n % 2].push(0, {f"a{n}": b"1", "b": b"%d" % n}) for n in range(10))
    )
    assert sum(pushed) == 1
    winner = pushed.index(True)
    found = {f"a{winner}": b"1", "b": b"%d" % winner}
    assert await second.pull(0) == (2, False, found)
    assert await second.pull(2) == (2, False, {})
    assert await second.push(2, {"b": b""})
    assert await first.pull(2) == (3, False, {"b": b""})
    n_found = first.n_found
    server.stop()
    with pytest.raises(UnavailableError):
        await first.pull(3)
    server.start()
    await first._link.found.wait()
    assert first.n_found == n_found + 1  # it may have lost changes
    assert await first.pull(-1) == await first.pull(9) == (3, True, {f"a{winner}": b"1"})


async def test_many_records_are_read_in_pages_though_others_change_them(
    replicas: RedisFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply with all of them would take so long that Redis would seem to be away."""
    first, second = replicas.both
    kept = {f"file-{n}": b"%d" % n for n in range(3000)}
    assert await first.push(0, kept)
    sizes, scan = list[int](), second._redis.hscan

    async def change_meanwhile(*args: Any, **options: Any) -> Any:
        cursor, page = await scan(*args, **options)
        n = len(sizes)
        sizes.append(len(page))
        version, _, _ = await first.pull(3000)
        changes = {f"file-{n}": b"" if n % 2 else b"new", f"more-{n}": b"1"}
        assert await first.push(version, changes)
        kept.update(changes)
        return cursor, page

    monkeypatch.setattr(second._redis, "hscan", change_meanwhile)
    version, is_whole, found = await second.pull(-1)
    assert (version, is_whole) == (3000 + 2 * len(sizes), True)
    assert found == {name: record for name, record in kept.items() if record}
    assert max(sizes) < 300


async def test_each_part_of_a_work_is_claimed_and_counted_once(replicas: RedisFleet) -> None:
    first, second = replicas.both
    claims = [(first, second)[n % 2].claim("w", 8) for n in range(12)]
    claimed = await asyncio.gather(*claims)
    assert sorted(part for part in claimed if part is not None) == [*range(8)]
    mine = [(n % 2, part) for n, part in enumerate(claimed) if part is not None]
    late = sorted(part for n, part in mine if n == 0)
    replicas.advance(LEASE_SECONDS - 1)
    await second._renew()  # and the first does not
    replicas.advance(2)
    again = [await second.claim("w", 8) for _ in range(9)]
    assert sorted(part for part in again if part is not None) == late
    for part in late:  # both have done it
        for replica in (first, second):
            await replica.finish("w", part, {"n": 10})
    assert await first.progress(["w", "none"]) == [
        {"finished": len(late), "n": 10 * len(late), "next": 8},
        {},
    ]
    n, given = next(one for one in mine if one[0] == 1)
    await second.release("w", given)
    assert await first.claim("w", 8) == given
    assert await first.claim("w", 8) is None
    for n, part in mine:
        await (first, second)[n].finish("w", part, {"n": 1})
    assert (await first.progress(["w"]))[0]["finished"] == 8


async def test_a_late_replica_does_not_do_a_part_twice_at_once(replicas: RedisFleet) -> None:
    first, _ = replicas.both
    assert [await first.claim("w", 2) for _ in range(2)] == [0, 1]
    replicas.advance(LEASE_SECONDS + 1)
    assert await first.claim("w", 2) is None
    await first.finish("w", 0, {})
    assert (await first.progress(["w"]))[0]["finished"] == 1


async def test_all_claims_are_renewed_at_once(
    replicas: RedisFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands one by one would take so long that they, and leases of requests, end meanwhile."""
    first, second = replicas.both
    for work in ("a", "b"):
        assert [await first.claim(work, 5) for _ in range(5)] == [*range(5)]
    reply, asked = first._link.reply, list[Any]()

    def count(command: Any, *args: Any) -> Any:
        asked.append(command)
        return reply(command, *args)

    monkeypatch.setattr(first._link, "reply", count)
    replicas.advance(LEASE_SECONDS - 1)
    await first._renew()
    assert len(asked) == 1
    replicas.advance(2)
    assert [await second.claim(work, 5) for work in ("a", "b")] == [None, None]
