"""Records that replicas change together in Redis, by id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from kvasir.server.state.link import Link

_RECORDS_BYTES, _RECORDS_AT_ONCE = 2**21, 100  # whose time a reply may take


class Records:
    """The part of `RedisState` that has the records, of which each change counts."""

    _link: Link
    _redis: Any
    _scripts: dict[str, Any]

    def _script(self, name: str, key: str, *args: Any) -> Callable[[], Awaitable[Any]]:
        return lambda: self._scripts[name](keys=[f"kvasir:{key}"], args=args)

    async def pull(self, seen: int) -> tuple[int, bool, dict[str, bytes]]:
        """Return the version of the records, and by id those that have changed since the one seen.

        b"" is one that is gone. True: these are all records, since the changes are unknown.
        """
        pull = self._script("pull", "records", seen)
        version, found = await self._link.reply(pull, _RECORDS_BYTES)
        if found is not None:
            pairs = zip(found[::2], found[1::2], strict=True)
            return version, False, {name.decode(): record for name, record in pairs}
        records, cursor = dict[bytes, bytes](), None
        while cursor != 0:  # in pages: a reply with all would look like none
            scan = partial(self._redis.hscan, "kvasir:records", cursor or 0, count=_RECORDS_AT_ONCE)
            cursor, page = await self._link.reply(scan, _RECORDS_BYTES)
            records |= page
        version, is_whole, changed = await self.pull(version)  # meanwhile
        if not is_whole:
            changed = {name.decode(): record for name, record in records.items()} | changed
        return version, True, {name: record for name, record in changed.items() if record}

    async def push(self, version: int, changes: Mapping[str, bytes]) -> bool:
        """Change records if their version is still this one; b"" removes one. Return if it was."""
        push = self._script("push", "records", version, *chain(*changes.items()))
        return bool(await self._link.reply(push, _RECORDS_BYTES))
