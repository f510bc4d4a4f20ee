"""Questions of a load test to a server before it starts: context length, and chat or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvasir.loadtest.sse_client import error_message

_TIMEOUT = 60.0  # seconds for an answer; the server may be busy with other clients


class NotServedError(Exception):
    """A server that cannot be loaded. The message is one line with the reason."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The first model of a server."""

    max_model_len: int | None  # tokens of prompt and answer; None if the server does not say
    has_chat: bool


def query_model(url: str, headers: Mapping[str, str]) -> ServedModel:
    """Ask a server about its model. Raises NotServedError if it does not answer, or refuses."""
    listed = _request(f"{url}/v1/models", headers)
    try:
        max_model_len = listed["data"][0].get("max_model_len")
    except (AttributeError, LookupError, TypeError):
        reason = "lists no model: is this an OpenAI-compatible server?"
        raise NotServedError(f"{url}/v1/models {reason}") from None
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    chat = _request(f"{url}/v1/chat/completions", headers, json.dumps(body).encode())
    return ServedModel(max_model_len, has_chat=chat is not None)


def _request(url: str, headers: Mapping[str, str], body: bytes | None = None) -> Any:
    """Return the JSON of an answer, or None if a body is refused with 400."""
    try:
        with urlopen(Request(url, body, dict(headers)), timeout=_TIMEOUT) as response:  # noqa: S310
            return json.loads(response.read())
    except HTTPError as error:
        with error:
            message = error_message(error.read())
        if error.code == 400 and body is not None:  # the model has no chat template
            return None
        raise NotServedError(f"{url} answers HTTP {error.code}: {message}") from None
    except (HTTPException, OSError, ValueError) as error:
        raise NotServedError(f"{url} does not answer as a server should: {error}") from error
