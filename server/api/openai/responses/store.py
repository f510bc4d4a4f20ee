"""The responses that are kept, and those that are streamed now, here or by another replica."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvasir.server.api.http.pieces import Written, written
from kvasir.server.api.openai.formatting import JSON
from kvasir.server.errors import NotFoundError, UnavailableError
from kvasir.server.state.state import Key, Question, State, Stored


def conversation(stored: Stored) -> list[JSON]:
    """Return the items before a response, and its own."""
    items: list[JSON] = json.loads(stored.items)
    items += json.loads(stored.output)
    return items


class ResponseStore:
    """The stored responses of a server or, by its state, of all replicas."""

    def __init__(self, state: State) -> None:
        self.state = state
        state.answer = self._answer

    def check(self) -> None:
        """Raise UnavailableError while nothing can be stored for other replicas."""
        if not self.state.is_up:
            raise UnavailableError(
                "the state that replicas share cannot be reached, so this response could not be "
                "kept; try again in a moment, or send store false",
                retry_after=1,
            )

    async def get(self, key: Key, param: str | None = None) -> Stored:
        """Return a response; `param` names the field that has the id.

        Raises NotFoundError and UnavailableError.
        """
        if (stored := await self.state.get(key)) is None:
            raise self.missing(key[1], param)
        return stored

    async def shown(self, question: Question, key: Key) -> Written:
        """Return a response as JSON: stored, or as it is streamed anywhere now.

        With the question `cancel` a stream is ended. Raises as `get` does.
        """
        if (running := self._running(question, key)) is not None:
            return running
        if (stored := await self.state.get(key)) is None:
            if (elsewhere := await self.state.ask(question, key)) is not None:
                return elsewhere
            stored = await self.get(key)  # it may have ended meanwhile
        response: Written = stored.response  # type: ignore[assignment]  # as it was put
        return response

    def _running(self, question: Question, key: Key) -> Written | None:
        """Return a response that is streamed here, if it has not ended."""
        formatter: Any = self.state.streaming.get(key)
        if formatter is None or not formatter.is_running:
            return None
        if question == "get":
            return written(formatter.response)
        formatter.cancel()
        return written(formatter.response | {"status": "cancelled"})

    async def _answer(self, question: Question, key: Key) -> bytes | None:
        """Answer another replica."""
        shown = self._running(question, key)
        if shown is None or isinstance(shown, bytes):
            return shown
        return await asyncio.to_thread(b"".join, shown)

    async def pop(self, key: Key) -> None:
        """Remove a response. Raises as `get` does."""
        if not await self.state.pop(key):
            raise self.missing(key[1])

    async def of_items(self, owner: bytes, item_ids: list[str]) -> dict[Key, Stored]:
        """Return the responses whose outputs have items; their ids are parts of the items'.

        Each is read once, however many of its items there are. Raises as `get` does.
        """
        found = dict[Key, Stored]()
        for item_id in item_ids:
            _, _, rest = item_id.partition("_")
            if (key := (owner, f"resp_{rest.partition('_')[0]}")) in found:
                continue
            if (stored := await self.state.get(key)) is None:
                raise self.missing(item_id, "input")
            found[key] = stored
        return found

    def missing(self, name: str, param: str | None = None) -> NotFoundError:
        """Return the error for the id of a response, or of an item, that is not here."""
        return NotFoundError(
            f"there is no {name[:100]!r} here: the last {self.state.max_responses} responses are "
            f"kept, at most {self.state.max_bytes} bytes, each for the API key that asked for it, "
            "and none with store false; it may have been dropped, or another replica that shares "
            "no state may have it: send the whole conversation as input",
            param=param,
        )
