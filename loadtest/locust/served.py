"""What a load test has to know of the server before it starts: how long texts may be, and whether the model chats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from loadtest.sse_client import error_message

_SECONDS = 60.0  # that an answer may take: the server may be busy with others


class NotServedError(Exception):
    """There is nothing to load; the message says why, in a line."""


@dataclass(frozen=True, slots=True)
class Served:
    """max_model_len: tokens of a prompt and its answer together; None where the server does not say."""

    max_model_len: int | None
    has_chat: bool


def ask(url: str, headers: Mapping[str, str]) -> Served:
    """Raises NotServedError where the server does not answer, or refuses."""
    listed = _answer(url, "/v1/models", headers)
    try:
        max_model_len = listed["data"][0].get("max_model_len")
    except (AttributeError, LookupError, TypeError):
        raise NotServedError(
            f"{url}/v1/models lists no model: is this an OpenAI-compatible server?"
        ) from None
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    try:
        _answer(url, "/v1/chat/completions", headers, body)
    except NotServedError as error:
        if (
            isinstance(error.__cause__, HTTPError) and error.__cause__.code == 400
        ):  # the model has no chat template
            return Served(max_model_len, has_chat=False)
        raise
    return Served(max_model_len, has_chat=True)


def _answer(
    url: str, path: str, headers: Mapping[str, str], body: dict[str, Any] | None = None
) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, dict(headers)), timeout=_SECONDS) as response:  # noqa: S310
            return json.loads(response.read())
    except HTTPError as error:
        with error:
            raise NotServedError(
                f"{url}{path} answers HTTP {error.code}: {said(error.read())}"
            ) from error
    except (HTTPException, OSError, ValueError) as error:
        raise NotServedError(f"{url} does not answer as a server should: {error}") from error


def said(body: bytes | str | None) -> str:
    """The message of an error's body, or the beginning of whatever came instead."""
    try:
        return error_message(json.loads(body or ""))
    except ValueError:
        return (body.decode(errors="replace") if isinstance(body, bytes) else body or "")[:200]
