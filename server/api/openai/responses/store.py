"""The responses that this process keeps, and those that it streams now."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from kvasir.server.api.http.pieces import Written
from kvasir.server.api.openai.formatting import JSON
from kvasir.server.errors import NotFoundError

MAX_RESPONSES = 1024  # that are kept

Key = tuple[bytes, str]  # the salt of the caller that it belongs to, and its id


class Stored(NamedTuple):
    """A response, the whole conversation before it, and its output as it is read again, as JSON."""

    response: Written
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

    def conversation(self) -> list[JSON]:
        """Return the items before the response, and its own."""
        items: list[JSON] = json.loads(self.items)
        items += json.loads(self.output)
        return items


class ResponseStore:
    """At most `MAX_RESPONSES` and so many bytes of them. For the event loop's thread.

    The oldest of the key that has most goes first, so no key drops what another one keeps.
    streaming: formatters of streams, for as long as they live.
    """

    def __init__(self, max_bytes: int) -> None:
        self.streaming: WeakValueDictionary[Key, Any] = WeakValueDictionary()
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Stored] = OrderedDict()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, stored: Stored) -> None:
        """Keep a response, if it is not larger than all may be."""
        if stored.n_bytes > self._max_bytes:
            return
        self._entries[key] = stored
        self._n_bytes += stored.n_bytes
        while len(self._entries) > MAX_RESPONSES or self._n_bytes > self._max_bytes:
            is_many = len(self._entries) > MAX_RESPONSES
            used = Counter[bytes]()
            for (owner, _), entry in self._entries.items():
                used[owner] += 1 if is_many else entry.n_bytes
            [(most, _)] = used.most_common(1)
            self.pop(next(key for key in self._entries if key[0] == most))

    def get(self, key: Key, param: str | None = None) -> Stored:
        """Return a response. Raises NotFoundError; `param` names the field that has the id."""
        if key not in self._entries:
            raise self.missing(key[1], param)
        return self._entries[key]

    def pop(self, key: Key) -> None:
        """Remove a response. Raises NotFoundError."""
        self._n_bytes -= self.get(key).n_bytes
        del self._entries[key]

    def of_item(self, owner: bytes, item_id: str) -> Key:
        """Return the key of the response whose output has an item; its id is a part of the item's.

        Raises NotFoundError.
        """
        _, _, rest = item_id.partition("_")
        key = owner, f"resp_{rest.partition('_')[0]}"
        if key not in self._entries:
            raise self.missing(item_id, "input")
        return key

    def missing(self, name: str, param: str | None = None) -> NotFoundError:
        """Return the error for the id of a response, or of an item, that is not here."""
        return NotFoundError(
            f"there is no {name[:100]!r} here: this server keeps its own last "
            f"{MAX_RESPONSES} responses in memory, at most {self._max_bytes} bytes, each for "
            "the API key that asked for it, and none with store false; it may have been dropped, "
            "or another replica may have it: send the whole conversation as input",
            param=param,
        )
