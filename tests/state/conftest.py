"""The server of a file's tests, which each empty it, and states that share it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from kvasir.server.state import link
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.redis_state import RedisState
from kvasir.server.state.state import State
from tests.kit.fake_runner import TIMEOUT
from tests.kit.redis_server import RedisServer, needs_redis, redis_server

MOST_BYTES = 2000


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with redis.Redis.from_url(shared_server.url) as client:
        client.flushall()
    return shared_server


class Fleet:
    """Two replicas; of memory it is one that both names mean."""

    def __init__(self, *replicas: State) -> None:
        self.replicas = replicas
        self.seconds = 0.0  # that have passed for memory

    def advance(self, seconds: float) -> None:
        """Let time pass for what is counted."""
        self.seconds += seconds


class RedisFleet(Fleet):
    """Replicas with a Redis, whose stamps go back instead of its clock going on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.both = RedisState(url, MOST_BYTES), RedisState(url, MOST_BYTES)
        super().__init__(*self.both)

    def advance(self, seconds: float) -> None:
        """See Fleet."""
        with redis.Redis.from_url(self.url) as client:
            for key in client.scan_iter("kvasir:tokens:*"):
                client.hincrbyfloat(key, "at", -seconds)
            for key in client.scan_iter("kvasir:*", _type="zset"):
                for lease in client.zrange(key, 0, -1):
                    client.zincrby(key, -seconds, lease)


@pytest.fixture
async def replicas(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RedisFleet]:
    monkeypatch.setattr(link, "_SLICES", 100 * TIMEOUT)  # on a busy machine
    fleet = RedisFleet(server.url)
    for replica in fleet.replicas:
        await replica.start()
    yield fleet
    for replica in fleet.replicas:
        await replica.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=needs_redis)])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    if request.param == "redis":
        shared: RedisFleet = request.getfixturevalue("replicas")
        return shared
    one = Fleet()
    state = MemoryState(MOST_BYTES, clock=lambda: one.seconds)
    one.replicas = (state, state)
    return one
