"""Anthropic's chat: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from kvasir.server.api.anthropic.conversion import chat_body
from kvasir.server.api.anthropic.schemas import (
    AnthropicMessage,
    CountTokensBody,
    MessagesBody,
    TokenCount,
)
from kvasir.server.api.http.body import TextRoute
from kvasir.server.api.http.pieces import compact
from kvasir.server.api.http.responses import BODY_ERRORS, STREAMED, served_model, state_of
from kvasir.server.api.http.streams import Formatter, event, respond
from kvasir.server.api.openai.chat import prepare, render
from kvasir.server.api.openai.formatting import JSON, join
from kvasir.server.api.openai.tools import AnswerForm, read
from kvasir.server.api.structured import naming
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.errors import ContextLengthError
from kvasir.server.requests.completion import Choice, Delta
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.answer import AnswerPiece, Reasoning
from kvasir.server.text.tool_calls import ToolCallPiece

router = APIRouter(route_class=TextRoute)

# Some clients send reasoning back only with a signature, which nothing checks.
_SIGNATURE = "unsigned"


@router.post("/v1/messages", response_model=AnthropicMessage, responses=STREAMED)
async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer in a conversation, as Anthropic does."""
    served, state = served_model(request), state_of(request.scope)
    chat = await served.text_worker.call(state.body_size, partial(chat_body, body))
    try:
        wanted, form = await prepare(request, chat, body.max_tokens)
    except ContextLengthError as error:  # Claude Code knows these words, and shortens the prompt
        raise ContextLengthError(f"prompt is too long: {error.message}") from None
    wanted = naming(wanted, "output_config.format")
    formatter = MessageFormatter(served, body, state.id, form)
    return respond(request, wanted, formatter, stream=body.stream)


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=BODY_ERRORS)
async def count_tokens(request: Request, body: CountTokensBody) -> Response:
    """Count the tokens of the prompt that a conversation makes."""
    served, state = served_model(request), state_of(request.scope)
    chat = await served.text_worker.call(state.body_size, partial(chat_body, body))
    _, text = await render(request, chat)

    def work() -> int:
        served.builder.check_text(text, "messages")
        # Only the batch method releases the interpreter's lock.
        (encoding,) = served.model_dir.tokenizer.encode_batch_fast(
            [text], add_special_tokens=chat.add_special_tokens
        )
        return len(encoding)

    return JSONResponse({"input_tokens": await served.text_worker.call(len(text), work)})


class MessageFormatter(Formatter):
    """The form of a message, whose blocks come one after the other."""

    keep_alive = event('{"type":"ping"}', "ping")

    def __init__(
        self, served: ServedModel, body: MessagesBody, request_id: str, form: AnswerForm
    ) -> None:
        super().__init__(served)
        self._id = f"msg_{request_id}"
        self._parser = form.parser()
        self._has_reasoning = form.has_reasoning
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._max_tokens = body.max_tokens
        self._has_begun = False
        self._content: list[JSON] = []  # the blocks so far, without their text on a stream
        self._open: object = None  # the kind of the last block, while more of it may come

    def event(self, part: JSON) -> bytes:
        """Return an event with its type."""
        return event(compact(part), part["type"])

    def keep(self, part: JSON) -> None:
        """Add a delta to its block."""
        if part["type"] == "content_block_delta":
            added = {k: value for k, value in part["delta"].items() if k != "type"}
            join(self._content[part["index"]], added)

    def tail(self) -> bytes:
        """Return the events with the reason of the end and the usage."""
        reason, stop = self._stop(self.completion.choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return self.event(end) + self.event({"type": "message_stop"})

    def whole(self) -> JSON:
        """Return the body of a finished message."""
        for block in self._content:
            if block["type"] == "tool_use":
                written, given = block.pop("partial_json", ""), None
                with suppress(ValueError):  # the limit may have cut it, or it is no JSON
                    given = from_json(written, allow_inf_nan=False, allow_partial=True)
                block["input"] = given if isinstance(given, dict) else {}
        return self._message(*self._stop(self.completion.choices[0]))

    def _message(self, reason: str | None, stop: str | None) -> JSON:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": self._content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    def parts(self, delta: Delta) -> Iterator[JSON]:
        """Yield the events of the message's beginning, and of the blocks that a delta adds to."""
        if not self._has_begun:
            self._has_begun = True
            message = self._message(None, None)
            message["usage"]["output_tokens"] = 0  # how many have come depends on the load
            yield {"type": "message_start", "message": message}
        if (answer := read(self._parser, delta, self.completion)) is None:
            return
        pieces, reason = answer
        for piece in pieces:
            kind = piece.index if isinstance(piece, ToolCallPiece) else type(piece)
            if kind != self._open:
                yield from self._close()
                self._open, block = kind, _block(piece)
                index = len(self._content)
                yield {"type": "content_block_start", "index": index, "content_block": block}
                self._content.append(block)
            part = _part(piece)
            if part is not None and not (kind is Reasoning and self._omits_thinking):
                yield self._delta(part)
        if reason is not None:
            yield from self._close()

    def _close(self) -> Iterator[JSON]:
        if self._open is None:
            return
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = None
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, part: JSON) -> JSON:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": part}

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        """Return the reason of the end in Anthropic's words, and the stop sequence if it is one."""
        stop: str | None = None
        if choice.shown_reason == "tool_calls":
            reason = "tool_use"
        elif choice.finish_reason is FinishReason.STOP:
            stop = choice.stops.stop_string
            reason = "end_turn" if stop is None else "stop_sequence"
        elif choice.finish_reason is FinishReason.LENGTH and choice.n_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        else:  # also at the deadline, for which Anthropic has no name
            reason = "max_tokens"
        choice.shown_reason = reason
        return reason, stop

    def _usage(self) -> JSON:
        completion = self.completion
        n_cached = completion.n_cached_tokens
        usage: JSON = {
            "input_tokens": completion.n_prompt_tokens - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": completion.n_completion_tokens,
        }
        if self._has_reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": self._parser.n_reasoning}
        return usage


def _block(piece: AnswerPiece) -> JSON:
    """Return the block that a piece begins, without content."""
    if isinstance(piece, str):
        return {"type": "text", "text": ""}
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    call_id = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}


def _part(piece: AnswerPiece) -> JSON | None:
    """Return what a piece adds to its block, None for nothing."""
    if isinstance(piece, str):
        return {"type": "text_delta", "text": piece}
    if isinstance(piece, Reasoning):
        return {"type": "thinking_delta", "thinking": piece.text}
    written = piece.arguments
    return {"type": "input_json_delta", "partial_json": written} if written else None
