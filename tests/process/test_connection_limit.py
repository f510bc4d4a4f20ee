"""Room for who asks: of too many connections the one that has been idle for longest goes."""

from __future__ import annotations

import logging
import random
import resource
import socket

import pytest

from server.process.connection_limit import ConnectionLimit, most_connections
from tests.fake_runner import TIMEOUT, FakeRunner
from tests.live import KEY, live
from tests.serving import VOCAB_SIZE


class Peer:
    def __init__(self) -> None:
        self.is_idle, self.is_dropped = True, False

    def drop(self) -> None:
        self.is_dropped = True


@pytest.mark.parametrize("seed", range(5))
def test_the_one_that_is_idle_for_longest_makes_room(seed: int) -> None:
    chance = random.Random(seed)
    most = chance.randint(1, 8)
    limit, inside, dropped = ConnectionLimit(most), list[Peer](), 0
    for _ in range(500):
        peer = chance.choice(inside) if inside and chance.random() < 0.6 else None
        if peer is None:  # comes
            inside.append(peer := Peer())
            expected = next(one for one in inside if one.is_idle) if len(inside) > most else None
            limit.let_in(peer, len(inside))
            assert [one for one in inside if one.is_dropped] == (
                [] if expected is None else [expected]
            )
            inside = [one for one in inside if not one.is_dropped]
            dropped += expected is not None
        elif chance.random() < 0.1:  # leaves
            limit.asks(peer)
            inside.remove(peer)
        else:
            peer.is_idle = not peer.is_idle
            (limit.idles if peer.is_idle else limit.asks)(peer)
            inside.remove(peer)
            inside.append(peer)
    assert dropped > 50


def test_there_are_fewer_connections_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((40, 20), (256, 192), (2**20, 2**20 - 64), (resource.RLIM_INFINITY, 2**20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most


def is_open(connection: socket.socket) -> bool:
    """Whether the server still answers there."""
    try:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(2**16) != b""
    except ConnectionError:
        return False


def test_silent_connections_shut_nobody_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that are being read or answered keep their connection: where all do, a newcomer is cut off."""
    monkeypatch.setattr("server.process.serve.most_connections", lambda: 4)
    with live(FakeRunner(VOCAB_SIZE)) as served, caplog.at_level(logging.WARNING):
        address = ("127.0.0.1", served.port)
        silent = [socket.create_connection(address, TIMEOUT) for _ in range(10)]
        for connection in silent[:6]:
            assert connection.recv(1) == b""
        assert all(map(is_open, silent[6:]))
        waiting = []
        for _ in range(4):
            waiting.append(connection := socket.create_connection(address, TIMEOUT))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9"
            )
            connection.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert connection.recv(2**16).startswith(b"HTTP/1.1 100 ")
        assert not any(map(is_open, silent))
        with socket.create_connection(address, TIMEOUT) as newcomer:
            assert not is_open(newcomer)
        for connection in waiting:
            connection.sendall(b"{invalid}")
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
        for connection in (*silent, *waiting):
            connection.close()
    assert [
        record.getMessage() for record in caplog.records if "connections" in record.getMessage()
    ] == ["more connections than open files allow: cut off idle or new ones"]
