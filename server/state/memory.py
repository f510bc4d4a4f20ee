"""State in the memory of one server, which counts from zero after a restart."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from time import monotonic

from kvasir.server.state.state import Key, State, Stored, Taken


class MemoryState(State):
    """The state of this process alone. clock: seconds."""

    max_responses = 1024

    def __init__(self, max_bytes: int = 0, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(max_bytes)
        self._clock = clock
        self._used: dict[bytes, tuple[float, float]] = {}  # tokens by account, and when
        self.running = Counter[bytes]()  # requests by account
        self.responses: OrderedDict[Key, Stored] = OrderedDict()
        self._n_bytes = 0

    async def take(self, account: bytes, limit: int, n_tokens: int) -> Taken:
        """See State."""
        now = self._clock()
        used, at = self._used.get(account, (0.0, now))
        used = max(0.0, used - (now - at) * limit / 60)
        self._used[account] = used + (n_tokens if used < limit else 0), now
        return Taken(used)

    async def give_back(self, account: bytes, taken: Taken, n_tokens: int) -> None:  # noqa: ARG002
        """See State."""
        used, at = self._used[account]
        self._used[account] = max(0.0, used - n_tokens), at

    async def enter(self, account: bytes, limit: int) -> str | None:
        """See State."""
        if self.running[account] >= limit:
            return None
        self.running[account] += 1
        return ""

    async def leave(self, account: bytes, lease: str) -> None:  # noqa: ARG002
        """See State."""
        self.running[account] -= 1
        if not self.running[account]:
            del self.running[account]

    async def put(self, key: Key, stored: Stored) -> None:
        """See State."""
        if stored.n_bytes > self.max_bytes:
            return
        self.responses[key] = stored
        self._n_bytes += stored.n_bytes
        if len(self.responses) <= self.max_responses and self._n_bytes <= self.max_bytes:
            return
        counts, sizes = Counter[bytes](), Counter[bytes]()  # once, however many go
        for (owner, _), entry in self.responses.items():
            counts[owner] += 1
            sizes[owner] += entry.n_bytes
        while len(self.responses) > self.max_responses or self._n_bytes > self.max_bytes:
            used = counts if len(self.responses) > self.max_responses else sizes
            most = max(used, key=lambda owner: (used[owner], owner))
            oldest = next(key for key in self.responses if key[0] == most)
            counts[most] -= 1
            sizes[most] -= self.responses[oldest].n_bytes
            await self.pop(oldest)

    async def get(self, key: Key) -> Stored | None:
        """See State."""
        return self.responses.get(key)

    async def pop(self, key: Key) -> bool:
        """See State."""
        stored = self.responses.pop(key, None)
        self._n_bytes -= stored.n_bytes if stored else 0
        return stored is not None
