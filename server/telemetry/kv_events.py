"""What the prefix cache keeps and drops, told to routers over ZMQ: the only file that imports zmq.

The format is vLLM's, which llm-d's router reads, too: a topic, a number, and `[time, events]`.
"""

import socket
import threading
from collections import deque
from time import time_ns
from typing import Any

import zmq
from msgspec import msgpack

from kvasir.server.engine.kv.prefix_cache import BlockCache
from kvasir.server.engine.sequence import Sequence

# Messages, of about 1 KB each, for a subscriber that does not read; what comes beyond is lost.
_MOST_UNREAD = 10_000
_MOST_KEPT = 10_000  # messages for subscribers that have lost some; as many as vLLM's
_END = b"\xff" * 8  # the number that ends an answer, -1
_EVERY_ADDRESS = "*", "//0.0.0.0:", "//[::]:"  # of this machine, which nobody can connect to


class KVEvents:
    """Publishes the blocks of a cache from the engine's thread, which never waits for it.

    Blocks with a salt, of a key or an adapter, stay unsaid: other prompts could not use them.
    address: one with `*`, 0.0.0.0 or [::] listens, others are connected to. replay: one at which
    subscribers ask for messages again. Raises ValueError for one that cannot be used.
    """

    def __init__(
        self, model: str, cache: BlockCache[Any], address: str, replay: str | None
    ) -> None:
        self._cache, self.n_sent, cache.changes = cache, 0, []
        self._published = set[bytes]()
        self._events: list[list[Any]] = [["AllBlocksCleared"]]  # of an earlier process here
        try:
            own = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        except OSError as error:
            raise ValueError(f"kv_events: this machine's name has no address: {error}") from None
        self._topic = f"kv@{own}@{model}".encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_KEPT if replay else 1)
        self._socket = _opened(zmq.PUB, "kv_events", address, _MOST_UNREAD)
        if replay is not None:
            try:
                self._asked = _opened(zmq.ROUTER, "kv_events_replay", replay, _MOST_KEPT + 1)
            except ValueError:
                self._socket.close()
                raise
            threading.Thread(target=self._replay, name="kv events", daemon=True).start()

    def __call__(self, sequence: Sequence) -> None:
        """Publish what has changed in the cache on behalf of a sequence."""
        size, names = self._cache.block_size, sequence.block_names
        for name, is_kept in self._cache.changes or ():
            if not is_kept and name in self._published:
                self._published.remove(name)
                self._events.append(["BlockRemoved", [number_of(name)], None])
            elif is_kept and not sequence.prefix_salt:
                self._published.add(name)
                n = names.index(name)
                parent = number_of(names[n - 1]) if n else None
                tokens = sequence.prompt_ids[n * size : (n + 1) * size]
                self._events.append(
                    ["BlockStored", [number_of(name)], parent, tokens, size, None, None]
                )
        self._cache.changes = []
        if self._events:
            number, batch = self.n_sent.to_bytes(8, "big"), [time_ns() / 1e9, self._events]
            self._kept.append((number, msgpack.encode(batch)))
            self._socket.send_multipart((self._topic, *self._kept[-1]))
            self._events, self.n_sent = [], self.n_sent + 1

    def _replay(self) -> None:
        """Send the last messages again to whoever asks for those from a number on."""
        while True:
            client, *frames = self._asked.recv_multipart()
            if [len(frame) for frame in frames] != [0, 8]:  # an empty one, and a number
                continue
            for number, payload in (*self._kept, (_END, b"")):
                if number >= frames[1]:
                    self._asked.send_multipart((client, b"", number, payload))


def _opened(kind: int, setting: str, address: str, most_unread: int) -> "zmq.Socket[bytes]":
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, most_unread)
    opened.setsockopt(zmq.MAXMSGSIZE, 1024)  # that comes in
    opened.setsockopt(zmq.IPV6, 1)  # too; `*` is then both
    listens = kind == zmq.ROUTER or any(every in address for every in _EVERY_ADDRESS)
    try:
        (opened.bind if listens else opened.connect)(address)
    except zmq.ZMQError as error:
        opened.close()
        raise ValueError(f"{setting}: {address}: {error}") from None
    return opened


def number_of(name: bytes) -> int:
    """Return what stands for a block's name: 64 bits, as those of vLLM."""
    return int.from_bytes(name[:8], "big")
