"""What holds for the files and batches of a server alone and for those of several."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvasir.server.api.http.upload import Content
from kvasir.server.batches import store as batch_store
from kvasir.server.batches.objects import StoredBatch
from kvasir.server.batches.shared_store import SharedStore
from kvasir.server.batches.store import RECORD_BYTES, BatchStore
from kvasir.server.errors import ConflictError, NotFoundError, RequestTooLargeError
from kvasir.server.state import link
from kvasir.server.state.redis_state import RedisState
from tests.kit.batches import ENDPOINT, NOW
from tests.kit.fake_runner import TIMEOUT
from tests.kit.redis_server import needs_redis, redis_server

MOST_BYTES = 60 * RECORD_BYTES


@pytest.fixture(params=["alone", pytest.param("shared", marks=needs_redis)])
async def stores(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[BatchStore]]:
    """The stores of two servers; alone it is one that both names mean."""
    if request.param == "alone":
        alone = BatchStore(tmp_path, max_bytes=MOST_BYTES, is_shared=True)
        yield [alone, alone]
        alone.close()
        return
    monkeypatch.setattr(link, "_SLICES", 100 * TIMEOUT)  # on a busy machine
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as server:
        states = [RedisState(server.url, 0) for _ in range(2)]
        for state in states:
            await state.start()
        limits = {"max_bytes": MOST_BYTES, "is_shared": True}
        yield [SharedStore(state, tmp_path, **limits) for state in states]
        for state in states:
            await state.close()


async def upload(store: BatchStore, owner: str, n_bytes: int) -> str:
    content = Content(store, owner)
    try:
        await content.hold(n_bytes, n_bytes)
        content.write(b"a" * n_bytes)
        return (await content.add("a")).id
    finally:
        await content.close()


async def begin(store: BatchStore, file_id: str, owner: str, now: float) -> StoredBatch:
    def work() -> StoredBatch:
        batch = store.create(store.file(file_id, owner), ENDPOINT, {"a": "b"}, now)
        store.save(batch)
        store.forget_ended(owner)
        return batch

    return await store.change(work)


async def end(store: BatchStore, batch_id: str, owner: str) -> None:
    def work() -> None:
        store.save(store.batch(batch_id, owner).model_copy().enter("completed", NOW))

    await store.change(work)


async def test_files_and_batches_are_as_the_slowest_rules_say(
    stores: list[BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of what each owner has, asked at any server after any change at any other."""
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 4)
    chance, refused = random.Random(0), set[type[Exception]]()
    files: dict[str, tuple[str, int]] = {}  # owner and size by id
    batches: dict[str, tuple[str, str, bool]] = {}  # owner, file, whether it has ended
    for now in range(200):
        store, owner = chance.choice(stores), chance.choice("ab")
        mine = [name for name, (whose, _) in files.items() if whose == owner]
        running = [one for one, (_, _, has_ended) in batches.items() if not has_ended]
        await store.refresh()
        used = dict.fromkeys("ab", 0)
        for whose, n_bytes in files.values():
            used[whose] += n_bytes + RECORD_BYTES
        for whose, _, _ in batches.values():
            used[whose] += RECORD_BYTES
        assert store.n_bytes == sum(used.values())
        left = max(0, (MOST_BYTES - sum(used.values()) - used[owner]) // 2)
        try:
            match chance.randrange(8):
                case 0 | 1:
                    n_bytes = chance.choice((1, 100, 2 * RECORD_BYTES))
                    files[await upload(store, owner, n_bytes)] = owner, n_bytes
                    assert n_bytes + RECORD_BYTES <= left + n_bytes
                case 2 | 7 if mine:
                    batch = await begin(store, file_id := chance.choice(mine), owner, now)
                    own = {n: one for n, one in batches.items() if one[0] == owner}
                    ended = [n for n, (_, _, has_ended) in own.items() if has_ended]
                    for name in ended[: max(0, len(own) - 3)]:
                        del batches[name]
                    batches[batch.id] = owner, file_id, False
                case 3 if running:
                    name = chance.choice(running)
                    whose, file_id, _ = batches[name]
                    await end(store, name, whose)
                    batches[name] = whose, file_id, True
                case 4 | 5 | 6 if files:
                    name = chance.choice([*mine, *files, *(batches[one][1] for one in running)])
                    await store.change(lambda: store.delete(store.file(name, owner)))  # noqa: B023
                    assert files.pop(name)[0] == owner
                    assert name not in [batches[one][1] for one in running]
        except (ConflictError, NotFoundError, RequestTooLargeError) as error:
            refused.add(type(error))
        other = chance.choice(stores)
        await other.refresh()
        assert {one.id: (one.owner, one.bytes) for one in other.files.values()} == files
        found = {
            one.id: (one.owner, one.input_file_id, one.status == "completed")
            for one in other.batches.values()
        }
        assert found == batches
        for name, (whose, _) in files.items():
            assert other.path(name).exists()
            with pytest.raises(NotFoundError):
                other.file(name, "a" if whose == "b" else "b")
    assert refused == {ConflictError, NotFoundError, RequestTooLargeError}


async def test_uploads_under_way_count(stores: list[BatchStore]) -> None:
    """Of all clients at all servers: together, and of each key, they have no more than they may."""
    one, other = stores
    first, second = Content(one, "a"), Content(other, "a")
    share = MOST_BYTES // 2 - RECORD_BYTES
    await first.hold(0, share + 1000)  # as much as there is
    with pytest.raises(RequestTooLargeError, match="left for you"):
        await second.hold(0, 0)
    third = Content(other, "b")
    await third.hold(*[MOST_BYTES // 4 - RECORD_BYTES] * 2)
    third.write(b"b" * (MOST_BYTES // 4 - RECORD_BYTES))
    with pytest.raises(RequestTooLargeError, match="left for you"):
        await third.hold(1, 1)
    first.write(b"a" * 10)
    assert (await first.add("a")).bytes == 10
    n_free = share - RECORD_BYTES - 10 - MOST_BYTES // 8  # what was not needed is, too
    await second.hold(n_free, n_free)
    for content in (first, second, third):
        await content.close()
    for store in stores:
        await store.refresh()
        assert store.n_bytes == 10 + RECORD_BYTES


async def test_uploads_together_never_exceed_the_limit(stores: list[BatchStore]) -> None:
    """Clients that do not say how much they send, in pieces that take turns."""
    chance, refused = random.Random(0), 0
    contents = [Content(store, owner) for store in stores for owner in "aabc"]
    sizes = dict.fromkeys(contents, 0)
    for content in contents:
        await content.hold(0, 0)
    left = [*contents]
    while left:
        content = chance.choice(left)
        piece = b"a" * chance.randrange(1, 9000)
        try:
            await content.hold(len(piece), 10_000)
            content.write(piece)
            sizes[content] += len(piece)
        except RequestTooLargeError:
            refused += 1
            left.remove(content)
            if chance.random() < 0.5:
                await content.close()
                sizes[content] = 0
            else:
                await content.add("a")
                await content.close()
        on_disk = sum(path.stat().st_size for path in stores[0].path("").iterdir())
        assert on_disk <= sum(sizes.values()) + RECORD_BYTES * len(contents)
        assert sum(sizes.values()) + RECORD_BYTES * len(left) <= MOST_BYTES
    assert refused == len(contents)
    for store in stores:
        await store.refresh()
        kept = [size for size in sizes.values() if size]
        assert store.n_bytes == sum(kept) + RECORD_BYTES * len(kept) <= MOST_BYTES
