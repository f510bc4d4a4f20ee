"""The form of a chat's response: messages with content and tool calls, whole or in chunks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from server.api.openai.chat_schemas import ChatBody
from server.api.openai.formatting import OpenAIFormatter
from server.api.openai.tools import ToolUse
from server.api.responses import compact, finite
from server.engine.sequence import FinishReason
from server.requests.completion import Choice, Completion, Delta
from server.requests.service import Service
from server.text.detokenizer import token_bytes, token_text
from server.text.tool_calls import Piece, ToolCallParser

JSON = dict[str, Any]


@dataclass(slots=True)
class _Message:
    """One choice's message so far."""

    parser: ToolCallParser | None
    content: str = ""
    tool_calls: list[JSON] = field(default_factory=list)
    logprobs: list[JSON] = field(default_factory=list)
    finish_reason: str | None = None


class ChatFormatter(OpenAIFormatter):
    """The form of a chat's response."""

    def __init__(self, service: Service, body: ChatBody, request_id: str, tools: ToolUse) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, f"chatcmpl-{request_id}", kind)
        self._tools = tools
        self._with_logprobs = body.logprobs
        self._hidden_ids = service.special_ids - tools.kept_ids
        self._messages: dict[int, _Message] = {}

    def events(self, delta: Delta) -> bytes:
        """Return the events for a delta, the first with the role."""
        index, start = delta.choice.index, b""
        if index not in self._messages:
            start = self._chunk(index, {"role": "assistant", "content": ""}, [], None)
        message = self._message(index)
        if message.finish_reason is not None:
            return b""
        content, calls = _read(message, self.completion, delta)
        changes: JSON = {"content": content} if content else {}
        if calls:
            changes["tool_calls"] = [{"index": i, **call} for i, call in calls.items()]
        logprobs = self._logprobs(delta)
        if not changes and not logprobs and message.finish_reason is None:
            return start
        return start + self._chunk(index, changes, logprobs, message.finish_reason)

    def add(self, delta: Delta) -> None:
        """Add a delta to its message."""
        message = self._message(delta.choice.index)
        if message.finish_reason is not None:
            return
        content, calls = _read(message, self.completion, delta)
        message.content += content
        for index, call in calls.items():
            if index == len(message.tool_calls):
                message.tool_calls.append(call)
            else:
                message.tool_calls[index]["function"]["arguments"] += call["function"]["arguments"]
        message.logprobs += self._logprobs(delta)

    def choice(self, choice: Choice) -> JSON:
        """Return a finished choice."""
        message = self._messages[choice.index]
        shown: JSON = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            shown |= {"content": message.content or None, "tool_calls": message.tool_calls}
        return {
            "index": choice.index,
            "message": shown,
            "logprobs": {"content": message.logprobs} if self._with_logprobs else None,
            "finish_reason": message.finish_reason,
        }

    def _message(self, index: int) -> _Message:
        if index not in self._messages:
            self._messages[index] = _Message(self._tools.parser())
        return self._messages[index]

    def _chunk(self, index: int, delta: JSON, logprobs: list[JSON], reason: str | None) -> bytes:
        shown = {"content": logprobs} if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return self.event(compact(choice))

    def _logprobs(self, delta: Delta) -> list[JSON]:
        scored = delta.logprobs
        if scored is None or not self._with_logprobs:
            return []
        top = [self._entry(token_id, logprob) for token_id, logprob in scored.top]
        return [{**self._entry(scored.token_id, scored.logprob), "top_logprobs": top}]

    def _entry(self, token_id: int, logprob: float) -> JSON:
        is_text = token_id not in self._hidden_ids
        return {
            "token": token_text(self.tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(token_bytes(self.tokenizer, token_id)) if is_text else None,
        }


def _read(message: _Message, completion: Completion, delta: Delta) -> tuple[str, dict[int, JSON]]:
    """Return a delta's content and its additions to calls, by index; note how the message ends."""
    parser, reason = message.parser, delta.finish_reason
    if parser is None:
        message.finish_reason = reason
        return delta.text, {}
    pieces: list[Piece] = parser.push(delta.text)
    if parser.is_over:
        completion.stop(delta.choice)
        reason = FinishReason.STOP
    if reason is not None:
        pieces += parser.flush()
        # A stop string or token may have cut the last call short.
        has_calls = parser.n_calls and not parser.is_in_call
        message.finish_reason = (
            "tool_calls" if has_calls and reason is FinishReason.STOP else reason
        )
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: dict[int, JSON] = {}
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            call_id = f"call_{secrets.token_hex(12)}"
            calls[piece.index] = {"id": call_id, "type": "function", "function": function}
        call = calls.setdefault(piece.index, {"function": {"arguments": ""}})
        call["function"]["arguments"] += piece.arguments
    return content, calls
