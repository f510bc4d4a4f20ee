"""The server of the clients. It runs at most CAPACITY sequences at once; as many more may wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CAPACITY = 4
MESSAGES: list[Any] = [{"role": "user", "content": "def"}]
DAYS = ({"day": "mon"}, {"day": "tue"})
DAY = {
    "type": "object",
    "properties": {"day": {"enum": ["mon", "tue"]}},
    "required": ["day"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Server:
    """Address, model and key of the server."""

    url: str
    model: str
    key: str
    max_model_len: int

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Conformed:
    """The calls of a client that found what it expected."""

    client: str
    version: str
    calls: int
    note: str = ""


class Calls(list[str]):
    """The paths of a client's calls, which the hooks of its HTTP client tell."""

    def note(self, request: Any) -> None:
        self.append(request.url.path)

    async def note_async(self, request: Any) -> None:
        self.note(request)
