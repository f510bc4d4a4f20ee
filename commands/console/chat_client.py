"""A client of one chat on any OpenAI-compatible server, which streams its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from kvasir.model.platform.printable import error_message

_NO_TEMPLATE = re.compile(r"chat.template", re.IGNORECASE)  # Kvasir's words, and those of vLLM
_LONGEST = 500  # characters of an error
_CHAT, _TEXT = "/chat/completions", "/completions"


class ChatError(Exception):
    """An answer that could not be had; the message is the server's, in one line."""


class NoTemplateError(ChatError):
    """A model without a chat template, which only continues texts."""


class Delta(NamedTuple):
    """A piece of an answer. is_reasoning: of the thoughts before it."""

    text: str
    is_reasoning: bool = False


class ChatClient:
    """The routes of a server. Raises ValueError for an invalid URL, and ChatError.

    model: its id; None is the first that the server lists. timeout: seconds without a byte.
    through_proxy: the environment's, if that names one.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float,
        through_proxy: bool = True,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._opener = build_opener(*[ProxyHandler({})] * (not through_proxy))
        with self._open("/models") as response:
            listed = _parsed(response.read())
        entries = listed.get("data") if isinstance(listed, dict) else None
        by_id = {
            str(entry["id"]): entry
            for entry in entries or ()
            if isinstance(entry, dict) and "id" in entry
        }
        if not by_id and not model:
            raise ChatError(f"{self.url}/v1/models lists no model; name one with --model")
        self.model = model or next(iter(by_id))
        # Tokens of a prompt and its answer, where the server tells.
        about = by_id.get(self.model, {})
        self.max_model_len: int | None = about.get("max_model_len")
        self.has_sources = about.get("max_source_len") is not None  # of an encoder-decoder

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> Generator[Delta]:
        """Yield the answer to a conversation. Raises ChatError; NoTemplateError at once."""
        for choice in self._stream(_CHAT, {"messages": messages, **fields}):
            delta = choice.get("delta") or {}
            for name in ("reasoning_content", "reasoning"):
                if delta.get(name):
                    yield Delta(delta[name], is_reasoning=True)
                    break
            if delta.get("content"):
                yield Delta(delta["content"])

    def continued(self, text: str, **fields: Any) -> Generator[Delta]:
        """Yield the continuation of a text. Raises ChatError."""
        for choice in self._stream(_TEXT, {"prompt": text, **fields}):
            if choice.get("text"):
                yield Delta(choice["text"])

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, {"model": self.model, "stream": True, **body}) as response:
            try:
                for line in response:
                    content = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or content == b"[DONE]":
                        continue
                    event = _parsed(content)
                    if not isinstance(event, dict) or event.get("error"):
                        raise ChatError(_message(event))
                    yield from (event.get("choices") or ())[:1]
            except (OSError, HTTPException) as error:
                raise ChatError(f"the connection broke off: {error}") from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/v1{path}", data, self._headers)  # noqa: S310  checked above
        try:
            return self._opener.open(request, timeout=self._timeout)
        except HTTPError as error:
            message = _message(error.read())
            is_refusal = path == _CHAT and error.code in (400, 404, 422)
            if is_refusal and _NO_TEMPLATE.search(message):
                raise NoTemplateError(message) from None
            raise ChatError(f"{message} (HTTP {error.code})") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)  # of a URLError
            raise ChatError(f"no answer from {self.url}: {reason}") from None


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        raise ChatError(f"the server sent no JSON: {content[:100]!r}") from None


def _message(body: Any) -> str:
    """Return the message of an error in one line that is not too long."""
    return " ".join(error_message(body).split())[:_LONGEST]
