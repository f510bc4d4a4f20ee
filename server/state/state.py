"""The interface of state, which a server has in its memory or shares with other replicas."""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

Key = tuple[bytes, str]  # of a response: the salt of the caller that it belongs to, and its id
_SIZES = struct.Struct("<QQ")  # of a response, and of the items before it
Question = Literal["get", "cancel"]  # about a response that is being streamed


class Pieces(Protocol):
    """Bytes in pieces; the length may be an estimate."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class Stored(NamedTuple):
    """A response, the whole conversation before it, and its output as it is read again, as JSON."""

    response: bytes | Pieces
    items: bytes
    output: bytes

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return self.n_read + len(self.response)

    @property
    def n_read(self) -> int:
        """The bytes that a follow-up reads."""
        return len(self.items) + len(self.output)

    def packed(self, response: bytes) -> bytes:
        """Return it as bytes, which `unpacked` reads; its response may have been in pieces."""
        sizes = _SIZES.pack(len(response), len(self.items))
        return b"".join((sizes, response, self.items, self.output))

    @classmethod
    def unpacked(cls, value: bytes) -> Stored:
        """Return what was packed."""
        n_response, n_items = _SIZES.unpack_from(value)
        items_at = _SIZES.size + n_response
        output_at = items_at + n_items
        return cls(value[_SIZES.size : items_at], value[items_at:output_at], value[output_at:])


class Taken(NamedTuple):
    """The answer to a caller that takes tokens: those used before, and where they are counted."""

    n_used: float
    is_local: bool = True


class State(ABC):
    """Counts and responses that requests leave for later ones. For the event loop's thread.

    An account is a name under which tokens and requests are counted. streaming: formatters of
    streams, for as long as they live. answer: answers another replica's question about one of them
    in JSON, None if it has ended; whoever serves responses sets it.
    """

    max_responses: int

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of stored responses
        self.streaming: WeakValueDictionary[Key, Any] = WeakValueDictionary()
        self.answer: Callable[[Question, Key], Awaitable[bytes | None]] | None = None
        self._tasks = set[asyncio.Task[Any]]()

    @property
    def is_up(self) -> bool:
        """False while the state that replicas share cannot be reached."""
        return True

    @abstractmethod
    async def take(self, account: bytes, limit: int, n_tokens: int) -> Taken:
        """Take tokens, unless as many as a minute's are in use. So many are forgotten a minute."""

    @abstractmethod
    async def give_back(self, account: bytes, taken: Taken, n_tokens: int) -> None:
        """Give tokens back that were taken and not used."""

    @abstractmethod
    async def enter(self, account: bytes, limit: int) -> str | None:
        """Begin a request and return its lease; None if `limit` others run."""

    @abstractmethod
    async def leave(self, account: bytes, lease: str) -> None:
        """End a request."""

    @abstractmethod
    async def put(self, key: Key, stored: Stored) -> None:
        """Keep a response, if it is not larger than all may be.

        Beyond `max_bytes` and `max_responses` the oldest of the owner that has most goes first, so
        no owner drops what another one keeps.
        """

    @abstractmethod
    async def get(self, key: Key) -> Stored | None:
        """Return a response that is kept. Raises UnavailableError."""

    @abstractmethod
    async def pop(self, key: Key) -> bool:
        """Remove a response; return whether it was kept. Raises UnavailableError."""

    async def announce(self, key: Key, formatter: Any) -> None:
        """Note that a response is streamed here, until its formatter is no more."""
        self.streaming[key] = formatter

    async def ask(self, question: Question, key: Key) -> bytes | None:  # noqa: ARG002
        """Return the answer of another replica that streams a response; None if none does.

        Raises UnavailableError.
        """
        return None

    async def start(self) -> None:  # noqa: B027  (memory needs none)
        """Begin to share the state."""

    async def close(self) -> None:  # noqa: B027
        """End what `start` began."""

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work to its end, whoever waits for it is cancelled or not."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
