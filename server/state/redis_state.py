"""State that replicas share in Redis, or in a server that speaks its protocol, such as Valkey.

While it cannot be reached, limits are those of each replica alone, and what is to be stored waits.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from secrets import token_hex
from typing import Any

from kvasir.server.errors import UnavailableError
from kvasir.server.state import scripts
from kvasir.server.state.link import Link
from kvasir.server.state.memory import MemoryState
from kvasir.server.state.records import Records
from kvasir.server.state.state import Key, Question, State, Stored, Taken

LEASE_SECONDS = 15  # after which what a dead replica began no longer counts
_KEPT_SECONDS = 7 * 24 * 3600  # of a work
_STREAM_SECONDS = 60  # after which its streams are forgotten
_RENEW_SECONDS = 5.0
_START_SECONDS = _CLOSE_SECONDS = 1.0
_ANSWER_SECONDS = 2.0  # of another replica, which may be busy
_LONGEST_ID = 100  # characters; ours have fewer, and clients may send megabytes


class RedisState(Records, State):
    """The state of all replicas with this URL. Raises StartupError for one that cannot be read.

    Beside it are records, whose version counts changes, and work of numbered parts, which replicas
    claim; claims of a dead one end. Their methods raise UnavailableError, be it done or not.
    """

    max_responses = 2**16

    def __init__(self, url: str, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._link = Link(url)
        self._redis = self._link.redis
        public = ((name, one) for name, one in vars(scripts).items() if name[0].isupper())
        self._scripts = {name.lower(): self._redis.register_script(one) for name, one in public}
        self._channel = f"kvasir:replica:{token_hex(8)}"
        self._local = MemoryState(max_bytes)  # what is taken and stored while Redis is away
        self._owed = Counter[bytes]()  # tokens to give back, by account
        self._leases: dict[str, bytes] = {}  # accounts of the requests that run here
        self._claims = set[tuple[str, int]]()  # parts of work that are done here
        self.n_found = 0  # times that Redis came back, perhaps without its last changes
        self._asked: dict[str, asyncio.Future[bytes]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """See State."""
        return self._link.is_up

    async def start(self) -> None:
        """See State. Without Redis it takes a second, and the server starts all the same."""
        self._keeping = self.run(self._link.keep(self._restore, self._renew, _RENEW_SECONDS))
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await self._link.found.wait()

    async def close(self) -> None:
        """See State. Waits for what is being given back."""
        for name in ("_keeping", "_listening"):  # in this order: one begins the other
            task: asyncio.Task[None] | None = getattr(self, name)
            if task is not None:
                task.cancel()
                await asyncio.wait((task,), timeout=_CLOSE_SECONDS)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def take(self, account: bytes, limit: int, n_tokens: int) -> Taken:
        """See State."""
        with suppress(UnavailableError):
            command = self._script("take", f"tokens:{account.hex()}", limit, n_tokens)
            return Taken(float(await self._link.reply(command)), is_local=False)
        return await self._local.take(account, limit, n_tokens)

    async def give_back(self, account: bytes, taken: Taken, n_tokens: int) -> None:
        """See State."""
        if taken.is_local:
            await self._local.give_back(account, taken, n_tokens)
            return
        self._owed[account] += n_tokens
        with suppress(UnavailableError):
            await self._pay()

    async def _pay(self) -> None:
        """Give back what is owed."""
        while self._owed:
            account, n_tokens = self._owed.popitem()
            try:
                name = f"tokens:{account.hex()}"
                await self._link.reply(self._script("give_back", name, n_tokens))
            except UnavailableError:
                self._owed[account] += n_tokens
                raise

    async def enter(self, account: bytes, limit: int) -> str | None:
        """See State."""
        lease = token_hex(12)
        try:
            name = f"leases:{account.hex()}"
            command = self._script("enter", name, limit, LEASE_SECONDS, lease)
            has_place = await self._link.reply(command)
        except UnavailableError:
            has_place = Counter(self._leases.values())[account] < limit
        if not has_place:
            return None
        self._leases[lease] = account
        return lease

    async def leave(self, account: bytes, lease: str) -> None:
        """See State. While Redis is away the lease ends by itself."""
        del self._leases[lease]
        with suppress(UnavailableError):
            await self._end(account, [lease])

    async def living(self, account: bytes) -> set[str]:
        """Return the leases of an account that have not ended, of all replicas."""
        leases = await self._link.reply(self._script("living", f"leases:{account.hex()}"))
        return {lease.decode() for lease in leases}

    async def _end(self, account: bytes, leases: list[str]) -> None:
        await self._link.reply(lambda: self._redis.zrem(f"kvasir:leases:{account.hex()}", *leases))

    async def put(self, key: Key, stored: Stored) -> None:
        """See State."""
        try:
            await self._store(key, stored)
        except UnavailableError:
            await self._local.put(key, stored)

    async def _store(self, key: Key, stored: Stored) -> None:
        response = stored.response
        if not isinstance(response, bytes):
            response = await asyncio.to_thread(b"".join, response)
        n_bytes, value = len(response) + stored.n_read, stored.packed(response)
        if n_bytes <= self.max_bytes:
            args = *_names(key), self.max_bytes, self.max_responses, n_bytes, value
            await self._link.reply(self._script("put", "responses", *args), n_bytes)

    async def get(self, key: Key) -> Stored | None:
        """See State."""
        if (waiting := await self._local.get(key)) is not None:
            return waiting
        field = " ".join(_names(key))
        size = await self._link.reply(lambda: self._redis.hget("kvasir:responses:sizes", field))
        if size is None:
            return None
        value: bytes | None = await self._link.reply(
            lambda: self._redis.hget("kvasir:responses", field), int(size)
        )
        return None if value is None else Stored.unpacked(value)

    async def pop(self, key: Key) -> bool:
        """See State."""
        if await self._local.pop(key):
            return True
        return bool(await self._link.reply(self._script("pop", "responses", *_names(key))))

    async def claim(self, work: str, n_parts: int) -> int | None:
        """Return a part that nobody has claimed or finished; None if there is none."""
        command = self._script("claim", f"work:{work}", n_parts, LEASE_SECONDS, _KEPT_SECONDS)
        while (part := await self._link.reply(command)) is not None:
            if (work, part) not in self._claims:  # else it goes on here, and was late to say so
                self._claims.add((work, part))
                return int(part)
        return None

    async def finish(self, work: str, part: int, amounts: Mapping[str, int]) -> None:
        """End a part and add its amounts to those of its work, unless somebody has."""
        args = part, *chain(*amounts.items())
        await self._link.reply(self._script("finish", f"work:{work}", *args))
        self._claims.discard((work, part))

    async def release(self, work: str, part: int) -> None:
        """Let others claim a part that is not finished. While Redis is away its claim ends."""
        if (work, part) in self._claims:
            self._claims.remove((work, part))
            with suppress(UnavailableError):
                await self._hold([(work, part)], -1)

    async def _hold(self, claims: Collection[tuple[str, int]], seconds: int) -> None:
        keys, args = [f"kvasir:work:{work}" for work, _ in claims], [part for _, part in claims]
        if claims:
            hold = partial(self._scripts["hold"], keys=keys, args=[seconds, *args])
            await self._link.reply(hold)

    async def progress(self, works: Sequence[str]) -> list[Counter[str]]:
        """Return the amounts of each work, and as `finished` the number of its parts."""
        pipeline = self._redis.pipeline(transaction=False)
        for work in works:
            pipeline.hgetall(f"kvasir:work:{work}:done")
        found = await self._link.reply(pipeline.execute)
        return [Counter({name.decode(): int(n) for name, n in one.items()}) for one in found]

    async def announce(self, key: Key, formatter: Any) -> None:
        """See State."""
        await super().announce(key, formatter)
        with suppress(UnavailableError):
            await self._announce(key)

    async def _announce(self, key: Key) -> None:
        name = f"kvasir:streaming:{' '.join(_names(key))}"
        await self._link.reply(lambda: self._redis.set(name, self._channel, ex=_STREAM_SECONDS))

    async def ask(self, question: Question, key: Key) -> bytes | None:
        """See State."""
        names = _names(key)
        channel = await self._link.reply(
            lambda: self._redis.get(f"kvasir:streaming:{' '.join(names)}")
        )
        if channel is None or channel.decode() == self._channel:
            return None
        number = token_hex(8)
        message = json.dumps([number, self._channel, question, *names])
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            if not await self._link.reply(lambda: self._redis.publish(channel, message)):
                return None  # that replica has died
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await answer or None
        except TimeoutError:
            message = "the replica that streams this response does not answer; try again"
            raise UnavailableError(message, retry_after=1) from None
        finally:
            del self._asked[number]

    async def _listen(self) -> None:
        """Take the questions and answers of other replicas until Redis is away."""
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(self._channel)
            async for message in pubsub.listen():
                self.run(self._hear(message["data"]))
        except Exception as error:
            self._link.lose(str(error))
        finally:
            await pubsub.aclose()

    async def _hear(self, message: bytes) -> None:
        head, _, body = message.partition(b"\n")
        number, *rest = json.loads(head)
        if not rest:
            if number in self._asked and not self._asked[number].done():
                self._asked[number].set_result(body)
            return
        channel, question, owner, response_id = rest
        assert self.answer is not None
        answer = await self.answer(question, (bytes.fromhex(owner), response_id))
        reply = json.dumps([number]).encode() + b"\n" + (answer or b"")
        with suppress(UnavailableError):
            await self._link.reply(lambda: self._redis.publish(channel, reply), len(reply))

    async def _restore(self) -> None:
        """Tell Redis what it has missed."""
        self.n_found += 1
        if self._listening is not None:
            self._listening.cancel()
        self._listening = self.run(self._listen())
        await self._pay()
        for key, stored in list(self._local.responses.items()):
            await self._store(key, stored)
            await self._local.pop(key)

    async def _renew(self) -> None:
        """Tell Redis that the requests, parts of work and streams of this replica go on."""
        await self._hold(self._claims, LEASE_SECONDS)  # thousands, perhaps: at once
        by_account = defaultdict[bytes, list[str]](list)
        for lease, account in self._leases.items():
            by_account[account].append(lease)
        for account, leases in by_account.items():
            name = f"leases:{account.hex()}"
            await self._link.reply(self._script("renew", name, LEASE_SECONDS, *leases))
            if ended := [lease for lease in leases if lease not in self._leases]:
                await self._end(account, ended)
        for key in list(self.streaming):
            await self._announce(key)


def _names(key: Key) -> tuple[str, str]:
    """Return a response's owner and id as Redis' names have them. A cut id is that of none."""
    return key[0].hex(), key[1][:_LONGEST_ID]
