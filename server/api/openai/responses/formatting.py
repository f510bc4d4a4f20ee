"""The form of a response: items that grow by typed events, and the whole that they sum up to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from time import time
from typing import Any

from kvasir.server.api.http.pieces import LazyList, Written, compact, together, written
from kvasir.server.api.http.streams import Formatter
from kvasir.server.api.openai.formatting import JSON, token_logprobs
from kvasir.server.api.openai.responses.items import PREFIXES, sealed
from kvasir.server.api.openai.responses.schemas import ENCRYPTED, LOGPROBS, ResponsesBody
from kvasir.server.api.openai.responses.store import ResponseStore
from kvasir.server.api.openai.tools import AnswerForm, read
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.state.state import Key, Stored
from kvasir.server.text.answer import AnswerPiece, Reasoning
from kvasir.server.text.tool_calls import ToolCallPiece

_REASONS = {"length": "max_output_tokens", "timeout": "timeout"}
# The events of a kind of item's text, and the part of its content that has the text.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseFormatter(Formatter):
    """The events of one response, in their order, and the response that they make.

    key: under which it is stored if wanted, with `items`, the conversation before it.
    """

    def __init__(
        self,
        served: ServedModel,
        body: ResponsesBody,
        wanted: CompletionRequest,
        form: AnswerForm,
        key: Key,
    ) -> None:
        super().__init__(served)
        self._key = key
        self._parser = form.parser()
        self._hidden_ids = served.special_ids - form.kept_ids
        self._with_logprobs, self._n_top = LOGPROBS in body.include, body.top_logprobs
        self._with_encrypted = ENCRYPTED in body.include
        self._n_events = 0
        self._item: JSON | None = None  # that grows now
        self._pieces: list[str] = []  # of its text
        self._logprobs: list[TokenLogprobs] = []  # of its text
        self._scored: list[TokenLogprobs] = []  # of tokens whose text has not come yet
        self._is_cancelled = False
        self.store: ResponseStore | None = None  # if it is to be kept there
        self.items = b""
        self.response: JSON = {
            "id": key[1],
            "object": "response",
            "created_at": int(time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": served.name,
            "output": [],
            "usage": None,
            "temperature": wanted.params.temperature,
            "top_p": wanted.params.top_p,
            **body.echo(),
        }

    @property
    def is_running(self) -> bool:
        """True until the response has ended."""
        return bool(self.response["status"] == "in_progress")

    def cancel(self) -> None:
        """End the response before its time."""
        self._is_cancelled = True
        self.completion.stream.end(FinishReason.STOP)

    def event(self, part: JSON) -> Written:
        """Return an event with its type."""
        return written(part, compact, f"event: {part['type']}\ndata: ", "\n\n")

    def tail(self) -> Written:
        """Return the event of the end."""
        return self.event(self._ended())

    def whole(self) -> JSON:
        """Return the response, finished."""
        return self.response

    def failed(self, fields: JSON) -> bytes:
        """Return the events of an end by an error."""
        is_ours = fields["error"]["type"] != "invalid_request_error"
        code = "server_error" if is_ours else "invalid_prompt"
        error = {"code": code, "message": fields["error"]["message"]}
        parts = [*self._close("incomplete")]
        self.response |= {"status": "failed", "error": error, "usage": self._usage()}
        events = together([self.event(part) for part in [*parts, self._ended()]])
        return events if isinstance(events, bytes) else b"".join(events)

    def _ended(self) -> JSON:
        status = self.response["status"]
        end = "incomplete" if status == "cancelled" else status  # for which there is no event
        return self._made(f"response.{end}", response=self.response)

    def parts(self, delta: Delta) -> Iterator[JSON]:
        """Yield the events for a delta; those of the end of an item come before the next begins."""
        if not self._n_events:
            yield self._made("response.created", response=self.response)
            yield self._made("response.in_progress", response=self.response)
        if self._with_logprobs and delta.logprobs is not None:
            self._scored.append(delta.logprobs)
        n_reasoning = self._parser.n_reasoning
        if (answer := read(self._parser, delta, self.completion)) is None:
            return
        pieces, reason = answer
        if self._parser.n_reasoning > n_reasoning:  # its tags are no text either
            self._scored.clear()
        for piece in pieces:
            yield from self._add(piece)
        if reason is not None:
            yield from self._finish(reason)

    def _add(self, piece: AnswerPiece) -> Iterator[JSON]:
        """Yield the events for a part of the answer, which continues an item or begins one."""
        if isinstance(piece, ToolCallPiece):
            kind, text, name = "function_call", piece.arguments, piece.name
        else:
            is_reasoning = isinstance(piece, Reasoning)
            kind, name = ("reasoning" if is_reasoning else "message"), None
            text = piece.text if isinstance(piece, Reasoning) else piece
        if self._item is None or self._item["type"] != kind or name is not None:
            yield from self._close("completed")
            yield from self._open(kind, name)
        scored, self._scored = self._scored, []
        if not text:
            return
        self._pieces.append(text)
        if kind == "function_call":
            yield self._item_event("response.function_call_arguments.delta", delta=text)
            return
        more: JSON = {"content_index": 0, "delta": text}
        if kind == "message":
            self._logprobs += scored
            more["logprobs"] = self._shown(scored)
        yield self._item_event(f"response.{_TEXTS[kind]}.delta", **more)

    def _open(self, kind: str, name: str | None = None) -> Iterator[JSON]:
        """Yield the events of an item's beginning."""
        output = self.response["output"]
        place = f"{self._key[1].removeprefix('resp_')}_{len(output)}"
        item: JSON = {"id": f"{PREFIXES[kind]}_{place}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._item, self._pieces, self._logprobs = item, [], []
        output.append(item)
        yield self._made("response.output_item.added", output_index=len(output) - 1, item=item)
        if kind != "function_call":
            part = self._part(kind, "")
            yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[JSON]:
        """Yield the events of the end of the item that grows, if one does."""
        item = self._item
        if item is None:
            return
        text, kind = "".join(self._pieces), item["type"]
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            part = self._part(kind, text)
            more = {"logprobs": self._shown(self._logprobs)} if kind == "message" else {}
            texts = {"content_index": 0, "text": text, **more}
            yield self._item_event(f"response.{_TEXTS[kind]}.done", **texts)
            item["content"] = [part]
            yield self._item_event("response.content_part.done", content_index=0, part=part)
            if kind == "reasoning" and self._with_encrypted:
                item["encrypted_content"] = sealed(text)
        item["status"] = status
        place = len(self.response["output"]) - 1
        yield self._made("response.output_item.done", output_index=place, item=item)
        self._item = None

    def _finish(self, reason: str) -> Iterator[JSON]:
        """Yield the events of the last item's end, and set what the end of the response is."""
        if not self.response["output"]:  # clients expect a message, even without text
            yield from self._open("message")
        has_stopped = reason in (FinishReason.STOP, "tool_calls") and not self._is_cancelled
        is_cut_call = self._item is not None and self._item["type"] == "function_call"
        is_cut_call &= reason != "tool_calls"  # a stop string may have cut it short
        yield from self._close("completed" if has_stopped and not is_cut_call else "incomplete")
        if has_stopped:
            self.response |= {"status": "completed", "completed_at": int(time())}
        elif self._is_cancelled:
            self.response["status"] = "cancelled"
        else:
            details = {"reason": _REASONS[reason]}
            self.response |= {"status": "incomplete", "incomplete_details": details}

    async def finish(self) -> None:
        """Count the tokens, and store the response if wanted."""
        self.response["usage"] = self._usage()
        if self.store is not None:
            output = [
                item | {"content": [part | {"logprobs": []} for part in item["content"]]}
                if item["type"] == "message"  # whose log-probabilities no model reads
                else item
                for item in self.response["output"]
            ]
            kept = Stored(written(self.response), self.items, compact(output).encode())
            await self.store.state.put(self._key, kept)

    def _part(self, kind: str, text: str) -> JSON:
        part: JSON = {"type": _TEXTS[kind], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": self._shown(self._logprobs)}
        return part

    def _shown(self, scores: list[TokenLogprobs]) -> LazyList:
        form = partial(token_logprobs, self.tokenizer, hidden_ids=self._hidden_ids, hidden=[])
        return LazyList(scores, form, 1 + self._n_top)

    def _item_event(self, kind: str, **fields: Any) -> JSON:
        """Return an event of the item that grows."""
        assert self._item is not None
        place = len(self.response["output"]) - 1
        return self._made(kind, item_id=self._item["id"], output_index=place, **fields)

    def _made(self, kind: str, **fields: Any) -> JSON:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _usage(self) -> JSON:
        n_prompt, n_new = self.completion.n_prompt_tokens, self.completion.n_completion_tokens
        cached = {"cached_tokens": self.completion.n_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": cached,
            "output_tokens": n_new,
            "output_tokens_details": {"reasoning_tokens": self._parser.n_reasoning},
            "total_tokens": n_prompt + n_new,
        }
