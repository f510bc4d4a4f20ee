"""The server of the clients. It runs at most CAPACITY sequences at once; as many more may wait."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITY = 4


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
