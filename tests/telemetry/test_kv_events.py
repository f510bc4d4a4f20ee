"""What a router hears over ZMQ against the prefix cache itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.model.directory import load_model_dir
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import KVRows
from kvasir.server.engine.kv.store import KVStore
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.scheduler import Scheduler
from kvasir.server.engine.step_capacity import StepCapacity
from kvasir.server.errors import StartupError
from kvasir.server.process.engine_builder import build_encoder_engine, build_engine
from kvasir.server.settings import load_settings
from tests.kit.engine_driver import make_sequence
from tests.kit.fake_encoder import encoder_model_dir
from tests.kit.fake_runner import TIMEOUT

kv_events = pytest.importorskip(
    "kvasir.server.telemetry.kv_events", reason="needs the extra kv-events", exc_type=ImportError
)
zmq, msgpack = kv_events.zmq, kv_events.msgpack

STDLIB = Path(__file__).parents[2] / "examples/stdlib"
BLOCK, LONGEST, ROWS = 4, 64, 6
N_REQUESTS = 500


def rows(n_cached: int) -> KVStore:
    return KVRows(
        KVShape(1, 1, 1),
        max_num_seqs=ROWS,
        max_model_len=LONGEST,
        budget_tokens=10_000,
        cache=PrefixCache(n_cached, BLOCK),
    )


def blocks(n_cached: int) -> KVStore:
    return KVBlocks(n_blocks=n_cached, block_size=BLOCK, max_num_seqs=ROWS, max_model_len=LONGEST)


class Subscriber:
    """A router that listens, and what it believes to be cached: parents and tokens by number."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.replay = self.context.socket(zmq.DEALER)
        for one in (self.socket, self.replay):
            one.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
        self.index: dict[int, tuple[int | None, list[int]]] = {}
        self.next_number = self.n_removed = self.n_recovered = 0
        self.topic = b""

    def read(self, n_messages: int) -> None:
        """Take all messages up to a number of them."""
        while self.next_number < n_messages:
            self.topic, number, payload = self.socket.recv_multipart()
            if self.has_replay and int.from_bytes(number, "big") > self.next_number:
                for lost in self.asked_from(self.next_number):
                    self.n_recovered += self._take(*lost)
                self._take(number, payload)
            else:
                assert self._take(number, payload)

    has_replay = False

    def asked_from(self, first: int) -> list[tuple[bytes, bytes]]:
        """Return the messages from a number on, as vLLM's clients ask for them."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = [*iter(self.replay.recv_multipart, [b"", b"\xff" * 8, b""])]
        assert not any(empty for empty, _, _ in found)
        return [(number, payload) for _, number, payload in found]

    def _take(self, number: bytes, payload: bytes) -> bool:
        """Apply the next message; return False for another one."""
        if int.from_bytes(number, "big") != self.next_number:
            return False
        self.next_number += 1
        _, events = msgpack.decode(payload)
        for tag, *fields in events:
            self._apply(tag, *fields)
        return True

    def _apply(self, tag: str, *fields: Any) -> None:
        if tag == "AllBlocksCleared":
            self.index.clear()
        elif tag == "BlockRemoved":
            (number,), _medium = fields
            del self.index[number]
            self.n_removed += 1
        else:
            (number,), parent, tokens, size, _adapter, _medium = fields
            assert tag == "BlockStored"
            assert len(tokens) == size == BLOCK
            assert parent is None or parent in self.index
            assert number not in self.index
            self.index[number] = parent, tokens

    def prefix(self, number: int) -> list[int]:
        """Return all tokens for which a block stands."""
        parent, tokens = self.index[number]
        return tokens if parent is None else self.prefix(parent) + tokens


@contextmanager
def subscribed(
    cache: Any, monkeypatch: pytest.MonkeyPatch, replay: str | None = None
) -> Iterator[tuple[Any, Subscriber]]:
    """Yield a publisher and a subscriber, once the first knows of the second."""
    monkeypatch.setattr(zmq, "PUB", zmq.XPUB)  # a PUB that can be asked who subscribes
    publisher = kv_events.KVEvents("a-model", cache, "tcp://127.0.0.1:*", replay)
    subscriber = Subscriber()
    subscriber.socket.connect(publisher._socket.getsockopt(zmq.LAST_ENDPOINT))
    try:
        assert publisher._socket.recv() == b"\x01kv@"
        yield publisher, subscriber
    finally:
        publisher._socket.close()
        subscriber.context.destroy(0)


@pytest.mark.parametrize("make", [rows, blocks])
def test_the_index_of_a_subscriber_equals_the_cache(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After evictions; blocks with a salt, whose tokens are nobody else's to know, stay unsaid."""
    generator = np.random.default_rng(3)
    kv = make(ROWS * LONGEST // BLOCK + 20)
    scheduler = Scheduler(kv, StepCapacity(16, 0.0), scoring_chunk_size=16)
    secret = set[bytes]()
    with subscribed(kv.cache, monkeypatch) as (publisher, subscriber):
        scheduler.on_blocks = publisher
        for i in range(N_REQUESTS):
            beginning = np.random.default_rng(generator.integers(30)).integers(99, size=LONGEST)
            prompt = beginning[: generator.integers(1, LONGEST - 10)].tolist()
            prompt += generator.integers(99, size=generator.integers(8)).tolist()
            sequence = make_sequence(i, prompt, SamplingParams(max_tokens=2))
            if i % 5 == 0:
                sequence.cache_salt = b"a key"
                secret.update(kv.cache.names(prompt, b"a key"))
            scheduler.add(sequence)
            if generator.random() < 0.5:
                step(scheduler)
            if i % 100 == 0:
                subscriber.read(publisher.n_sent)
                known = {
                    kv_events.number_of(name) for name in kv.cache.blocks if name not in secret
                }
                assert subscriber.index.keys() == known
        while scheduler.held or scheduler.waiting:
            step(scheduler)
        subscriber.read(publisher.n_sent)
        kept = {kv_events.number_of(name) for name in kv.cache.blocks if name not in secret}
        assert subscriber.index.keys() == kept
        for number in kept:
            assert kv_events.number_of(kv.cache.names(subscriber.prefix(number))[-1]) == number
    assert subscriber.topic.startswith(b"kv@")
    assert subscriber.topic.endswith(b"@a-model")
    assert secret & kv.cache.blocks.keys()
    assert subscriber.n_removed > N_REQUESTS / 10


def test_a_subscriber_asks_for_the_messages_that_it_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is away, twice; the second time for more than are kept."""
    n_kept = 40
    monkeypatch.setattr(kv_events, "_MOST_KEPT", n_kept)
    kv, prompt = rows(ROWS * LONGEST // BLOCK), np.random.default_rng(3)
    scheduler = Scheduler(kv, StepCapacity(16, 0.0), scoring_chunk_size=16)
    with subscribed(kv.cache, monkeypatch, "tcp://127.0.0.1:*") as (publisher, subscriber):
        scheduler.on_blocks = publisher
        replay = publisher._asked.getsockopt(zmq.LAST_ENDPOINT)
        subscriber.replay.connect(replay)
        subscriber.has_replay = True

        def publish(n_messages: int) -> None:
            end = publisher.n_sent + n_messages
            while publisher.n_sent < end:
                ids = prompt.integers(99, size=LONGEST // 2).tolist()
                scheduler.add(make_sequence(0, ids, SamplingParams(max_tokens=2)))
                while scheduler.held or scheduler.waiting:
                    step(scheduler)

        publish(10)
        subscriber.read(publisher.n_sent)
        subscriber.socket.setsockopt(zmq.UNSUBSCRIBE, b"kv@")
        assert publisher._socket.recv() == b"\x00kv@"
        publish(10)
        subscriber.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        assert publisher._socket.recv() == b"\x01kv@"
        publish(10)
        for wrong in (b"", b"x"), (b"", b"x" * 8, b""), (b"",):
            subscriber.replay.send_multipart(wrong)  # and get no answer
        subscriber.read(publisher.n_sent)
        assert subscriber.n_recovered >= 10
        assert subscriber.index.keys() == {*map(kv_events.number_of, kv.cache.blocks)}
        publish(n_kept)
        kept = [int.from_bytes(number, "big") for number, _ in subscriber.asked_from(0)]
        assert kept == [*range(publisher.n_sent - n_kept, publisher.n_sent)]
        assert subscriber.asked_from(publisher.n_sent) == []
        plain = subscriber.context.socket(zmq.REQ)  # of vLLM's example; it reads one answer
        plain.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
        plain.connect(replay)
        plain.send(kept[-1].to_bytes(8, "big"))
        assert plain.recv_multipart()[0] == kept[-1].to_bytes(8, "big")


@pytest.mark.parametrize(
    ("host", "call"),
    [("0.0.0.0", "bind"), ("[::]", "bind"), ("127.0.0.1", "connect")],  # noqa: S104
)
def test_an_address_that_is_every_one_of_this_machine_listens(
    host: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connected there would be heard by nobody. The machine may have IPv6 alone."""
    monkeypatch.delattr(socket, "gethostbyname")  # which knows IPv4 only
    called = list[str]()
    for name in ("bind", "connect"):
        monkeypatch.setattr(zmq.Socket, name, lambda *_, name=name: called.append(name))
    events = kv_events.KVEvents("a-model", PrefixCache(4, BLOCK), f"tcp://{host}:5557", None)
    events._socket.close()
    assert called == [call]


def step(scheduler: Scheduler) -> None:
    """Compute the prompts of a step; those that are complete end."""
    for chunk in scheduler.schedule(0.0).prefills:
        scheduler.record(chunk, chunk.count)
        if chunk.completes_prompt:
            scheduler.finish(chunk.sequence)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_events": "tcp://nowhere"}, "kv_events: tcp://nowhere: "),
        ({"kv_events": "tcp://*:0", "prefix_cache_memory": 0}, "kv_events is for a lone decoder "),
        (
            {"kv_events": "tcp://*:0", "kv_events_replay": "tcp://nowhere"},
            "kv_events_replay: tcp://nowhere: ",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_engine(load_settings(model=[STDLIB], **options), load_model_dir(STDLIB))


def test_a_replay_needs_what_it_replays() -> None:
    with pytest.raises(StartupError, match="kv_events_replay needs kv_events"):
        load_settings(model=[STDLIB], kv_events_replay="tcp://*:0")


def test_an_encoder_has_no_cache_to_tell_of() -> None:
    settings = load_settings(model=[STDLIB], kv_events="tcp://*:0")
    with pytest.raises(ValueError, match="kv_events is for a lone decoder "):
        build_encoder_engine(settings, encoder_model_dir())
