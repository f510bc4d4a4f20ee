"""What holds for state in memory and for state that replicas share."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvasir.server.state.memory import MemoryState
from kvasir.server.state.state import Key, Stored
from tests.state.conftest import MOST_BYTES, Fleet

ACCOUNT = b"\x01" * 16


async def test_tokens_are_counted_over_all_replicas(fleet: Fleet) -> None:
    """A token a second is forgotten, and steps are so large that the test's own time is nothing."""
    chance, limit = random.Random(0), 60
    used = dict.fromkeys((b"", ACCOUNT), 0)
    running = []
    n_refused = 0
    for _ in range(60):
        seconds = 1000 * chance.randint(0, 2)
        fleet.advance(seconds)
        used = {account: max(0, n - seconds) for account, n in used.items()}
        account, replica = chance.choice([*used]), chance.choice(fleet.replicas)
        n_tokens = 1000 * chance.randint(1, 4)
        taken = await replica.take(account, limit, n_tokens)
        assert taken.n_used == pytest.approx(used[account], abs=300)
        if taken.n_used < limit:
            used[account] += n_tokens
            running.append((account, taken, n_tokens))
        else:
            n_refused += 1
        if running and chance.random() < 0.5:
            account, taken, n_tokens = running.pop(chance.randrange(len(running)))
            back = chance.choice((0, n_tokens // 2, n_tokens))
            await chance.choice(fleet.replicas).give_back(account, taken, back)
            used[account] = max(0, used[account] - back)
    assert 5 < n_refused < 55


async def test_racing_requests_take_what_one_after_the_other_would(fleet: Fleet) -> None:
    taken = await asyncio.gather(
        *(fleet.replicas[n % 2].take(ACCOUNT, 1000, 300) for n in range(40))
    )
    assert sum(one.n_used < 1000 for one in taken) == 4
    leases = await asyncio.gather(*(fleet.replicas[n % 2].enter(ACCOUNT, 8) for n in range(40)))
    held = [(n % 2, lease) for n, lease in enumerate(leases) if lease is not None]
    assert len(held) == 8
    assert await fleet.replicas[0].enter(b"", 1) is not None
    for n, lease in held[:3]:
        await fleet.replicas[n].leave(ACCOUNT, lease)
    again = [await fleet.replicas[n % 2].enter(ACCOUNT, 8) for n in range(5)]
    assert [lease is not None for lease in again] == [True] * 3 + [False] * 2


class Oracle:
    """The rule in its slowest form: a list by age."""

    def __init__(self, max_responses: int) -> None:
        self.kept: list[tuple[Key, Stored]] = []
        self.max_responses = max_responses

    def put(self, key: Key, stored: Stored) -> None:
        if stored.n_bytes > MOST_BYTES:
            return
        self.kept.append((key, stored))
        while True:
            sizes = [(key[0], one.n_bytes) for key, one in self.kept]
            if len(sizes) > self.max_responses:
                amounts = [(owner, 1) for owner, _ in sizes]
            elif sum(n for _, n in sizes) > MOST_BYTES:
                amounts = sizes
            else:
                return
            totals = [(sum(n for o, n in amounts if o == owner), owner) for owner, _ in amounts]
            most = max(totals)[1]
            self.kept.remove(next(one for one in self.kept if one[0][0] == most))


async def test_responses_are_kept_for_all_replicas_within_their_limits(fleet: Fleet) -> None:
    chance, oracle = random.Random(0), Oracle(max_responses=12)
    for replica in fleet.replicas:
        replica.max_responses = oracle.max_responses
    keys: list[Key] = []
    for n in range(80):
        key = chance.choice([b"", ACCOUNT, b"\x02" * 16]), f"resp_{n}"
        most = chance.choice((30, 100, 700))
        pieces = [bytes(chance.randbytes(chance.randint(0, most))) for _ in range(3)]
        stored = Stored(*pieces)
        await chance.choice(fleet.replicas).put(key, stored)
        oracle.put(key, stored)
        keys.append(key)
        if chance.random() < 0.2:
            key = chance.choice(keys)
            was_kept = key in dict(oracle.kept)
            assert await chance.choice(fleet.replicas).pop(key) is was_kept
            oracle.kept = [one for one in oracle.kept if one[0] != key]
        found = {key: await chance.choice(fleet.replicas).get(key) for key in keys}
        assert {k: one for k, one in found.items() if one is not None} == dict(oracle.kept)
    assert 0 < len(oracle.kept) < len(keys)


async def test_a_large_response_takes_the_place_of_many_small_ones_in_linear_time() -> None:
    n_reads = 0

    class Counted(Stored):
        @property
        def n_bytes(self) -> int:
            nonlocal n_reads
            n_reads += 1
            return len(self.items)

    state = MemoryState(1000)
    for i in range(1000):
        await state.put((b"a", str(i)), Counted(b"x", b"x", b""))
    n_reads = 0
    await state.put((b"a", "large"), Counted(b"x", b"x" * 1000, b""))
    assert len(state.responses) == 1
    assert n_reads < 4000
