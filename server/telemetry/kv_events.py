"""What the prefix cache keeps and drops, told to routers over ZMQ: the only file that imports zmq.

The format is vLLM's, which llm-d's router reads, too: a topic, a number, and `[time, events]`.
"""

import socket
from time import time_ns
from typing import Any

import zmq
from msgspec import msgpack

from kvasir.server.engine.kv.prefix_cache import BlockCache
from kvasir.server.engine.sequence import Sequence

# Messages, of about 1 KB each, for a subscriber that does not read; what comes beyond is lost.
_MOST_UNREAD = 10_000
_EVERY_ADDRESS = "*", "//0.0.0.0:", "//[::]:"  # of this machine, which nobody can connect to


class KVEvents:
    """Publishes the blocks of a cache from the engine's thread, which never waits for it.

    Blocks with a salt, of a key or an adapter, stay unsaid: other prompts could not use them.
    address: one with `*`, 0.0.0.0 or [::] listens, others are connected to. Raises ValueError if it
    cannot be used.
    """

    def __init__(self, address: str, model: str, cache: BlockCache[Any]) -> None:
        self._cache, self.n_sent, cache.changes = cache, 0, []
        self._published = set[bytes]()
        self._events: list[list[Any]] = [["AllBlocksCleared"]]  # of an earlier process here
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
        self._socket.setsockopt(zmq.IPV6, 1)  # too; `*` is then both
        is_own = any(every in address for every in _EVERY_ADDRESS)
        try:
            own = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
            (self._socket.bind if is_own else self._socket.connect)(address)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close()
            raise ValueError(f"kv_events: {address}: {error}") from None
        self._topic = f"kv@{own}@{model}".encode()

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
            self._socket.send_multipart((self._topic, number, msgpack.encode(batch)))
            self._events, self.n_sent = [], self.n_sent + 1


def number_of(name: bytes) -> int:
    """Return what stands for a block's name: 64 bits, as those of vLLM."""
    return int.from_bytes(name[:8], "big")
