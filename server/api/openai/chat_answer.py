"""The shape of a chat's answer: messages with content and calls, whole or in chunks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from server.api.openai.answers import Answer, finite
from server.api.openai.chat_schemas import ChatBody
from server.api.openai.tool_use import ToolUse
from server.api.sse import compact
from server.engine.sequence import FinishReason
from server.requests.completion import Choice, Completion, Delta
from server.requests.service import Service
from server.text.detokenizer import token_bytes, token_text
from server.text.tool_calls import Piece, ToolCallParser


@dataclass(slots=True)
class _Message:
    """One choice's message so far."""

    parser: ToolCallParser | None
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatAnswer(Answer):
    def __init__(self, service: Service, body: ChatBody, request_id: str, tools: ToolUse) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, f"chatcmpl-{request_id}", kind)
        self._tools = tools
        self._with_logprobs = body.logprobs
        self._hidden_ids = service.special_ids - tools.kept_ids
        self._messages: dict[int, _Message] = {}

    def chunk(self, completion: Completion, delta: Delta) -> bytes:
        index = delta.choice.index
        begins = index not in self._messages
        head = (
            self._chunk(completion, index, {"role": "assistant", "content": ""}) if begins else b""
        )
        message = self._messages.setdefault(index, _Message(self._tools.parser()))
        if message.finish_reason is not None:
            return b""
        pieces = _read(message, completion, delta)
        changes: dict[str, Any] = {}
        if content := "".join(piece for piece in pieces if isinstance(piece, str)):
            changes["content"] = content
        if calls := _calls(pieces):
            changes["tool_calls"] = [{"index": i, **call} for i, call in calls.items()]
        logprobs = self._logprobs_of(delta)
        if not changes and not logprobs and message.finish_reason is None:
            return head
        return head + self._chunk(completion, index, changes, logprobs, message.finish_reason)

    def add(self, completion: Completion, delta: Delta) -> None:
        message = self._messages.setdefault(delta.choice.index, _Message(self._tools.parser()))
        if message.finish_reason is not None:
            return
        pieces = _read(message, completion, delta)
        message.content += "".join(piece for piece in pieces if isinstance(piece, str))
        for index, call in _calls(pieces).items():
            if index == len(message.tool_calls):
                message.tool_calls.append(call)
            else:
                message.tool_calls[index]["function"]["arguments"] += call["function"]["arguments"]
        message.logprobs += self._logprobs_of(delta)

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = self._messages[choice.index]
        shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            shown |= {"content": message.content or None, "tool_calls": message.tool_calls}
        return {
            "index": choice.index,
            "message": shown,
            "logprobs": {"content": message.logprobs} if self._with_logprobs else None,
            "finish_reason": message.finish_reason,
        }

    def _chunk(
        self,
        completion: Completion,
        index: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        shown = {"content": logprobs} if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        return self.event(completion, compact(choice))

    def _logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        scored = delta.logprobs
        if scored is None or not self._with_logprobs:
            return []
        top = [self._entry(token_id, logprob) for token_id, logprob in scored.top]
        return [{**self._entry(scored.token_id, scored.logprob), "top_logprobs": top}]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Without bytes where the token adds nothing to the text."""
        is_text = token_id not in self._hidden_ids
        return {
            "token": token_text(self.tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(token_bytes(self.tokenizer, token_id)) if is_text else None,
        }


def _read(message: _Message, completion: Completion, delta: Delta) -> list[Piece]:
    """What a delta adds, and how it ends if it does."""
    parser, reason = message.parser, delta.finish_reason
    if parser is None:
        message.finish_reason = reason
        return [delta.text] if delta.text else []
    pieces = parser.push(delta.text)
    if parser.is_over:
        completion.stop(delta.choice)
        reason = FinishReason.STOP
    if reason is not None:
        pieces += parser.flush()
        has_calls = (
            parser.n_calls and not parser.is_in_call
        )  # a stop string or token may have cut the last one short
        message.finish_reason = (
            "tool_calls" if has_calls and reason is FinishReason.STOP else reason
        )
    return pieces


def _calls(pieces: list[Piece]) -> dict[int, dict[str, Any]]:
    """What pieces add to calls, by index."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": function,
            }
        call = calls.setdefault(piece.index, {"function": {"arguments": ""}})
        call["function"]["arguments"] += piece.arguments
    return calls
