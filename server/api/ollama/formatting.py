"""The form of Ollama's answers: an object, or a stream of them, one a line."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from time import perf_counter, time
from typing import Any, Literal

from pydantic_core import from_json

from kvasir.server.api.http.pieces import LazyList, Written, compact, written
from kvasir.server.api.http.streams import Formatter
from kvasir.server.api.ollama.schemas import OllamaBody
from kvasir.server.api.openai.formatting import JSON, join, token_logprobs
from kvasir.server.api.openai.tools import read
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.answer import AnswerParser, Reasoning
from kvasir.server.text.tool_calls import ToolCallPiece

Shown = Literal["message", "response"]  # the field of an answer that has its text


def utc(seconds: int) -> str:
    """Return a Unix time in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def head(served: ServedModel, asked: str | None) -> JSON:
    """Return the first fields of an answer; asked: the model's name as the client has it."""
    return {"model": asked or served.name, "created_at": utc(int(time()))}


def nanoseconds(start: float, end: float) -> int:
    """Return the nanoseconds between two times in seconds; 0 if they are the wrong way round."""
    return max(0, round((end - start) * 1e9))


class OllamaFormatter(Formatter):
    """The form of a message or of a text. arrived: in seconds of `perf_counter`."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        served: ServedModel,
        body: OllamaBody,
        shown: Shown,
        parser: AnswerParser,
        arrived: float,
    ) -> None:
        super().__init__(served)
        self._model, self._shown, self._parser, self._arrived = body.model, shown, parser, arrived
        self._with_logprobs, self._n_top = body.logprobs, body.top_logprobs
        self._whole: JSON = {}
        self._call: JSON | None = None  # that is being written, with its arguments as a text
        self._n_calls = 0
        self.keep_alive = f"{compact(self._line({}) | {'done': False})}\n".encode()

    def parts(self, delta: Delta) -> Iterator[JSON]:
        """Yield what a delta adds to a message; a call once it is complete."""
        if (answer := read(self._parser, delta, self.completion)) is None:
            return
        pieces, reason = answer
        part: JSON = {}
        for piece in pieces:
            if isinstance(piece, ToolCallPiece):
                if piece.name is not None:
                    join(part, self._ended_call())
                    self._call = {"name": piece.name, "arguments": ""}
                join(self._call, {"arguments": piece.arguments})
            elif isinstance(piece, Reasoning):
                join(part, {"thinking": piece.text})
            else:
                join(part, {"content": piece})
        if reason is not None:
            join(part, self._ended_call())
        if self._with_logprobs and delta.logprobs is not None:
            part["logprobs"] = [delta.logprobs]
        if part:
            yield part

    def event(self, part: JSON) -> Written:
        """Return the line of a part."""
        return written(self._line(part) | {"done": False}, after="\n")

    def keep(self, part: JSON) -> None:
        """Join a part with the whole."""
        join(self._whole, part)

    def tail(self) -> Written:
        """Return the last line, with the reason of the end and figures."""
        return written(self._line({}) | self._end(), after="\n")

    def whole(self) -> JSON:
        """Return the body of a finished answer."""
        return self._line(self._whole) | self._end()

    def failed(self, fields: dict[str, Any]) -> bytes:
        """Return the last line of a stream that an error has ended."""
        return f"{compact(fields)}\n".encode()

    def _line(self, part: JSON) -> JSON:
        part, line = {"content": "", **part}, head(self.served, self._model)
        scores = part.pop("logprobs", None)
        if self._shown == "message":
            line["message"] = {"role": "assistant", **part}
        else:
            line |= {"response": part.pop("content"), **part}
        if scores:
            line["logprobs"] = LazyList(scores, self._entry, 1 + self._n_top)
        return line

    def _ended_call(self) -> JSON:
        """Return the part of a message that is the call written so far, if it is a whole one.

        Clients run what they get, so one that the limit has cut is left out.
        """
        call, self._call = self._call, None
        arguments: Any = None
        with suppress(ValueError):
            arguments = call and from_json(call["arguments"], allow_inf_nan=False)
        if call is None or not isinstance(arguments, dict):
            return {}
        function = {"index": self._n_calls, "name": call["name"], "arguments": arguments}
        self._n_calls += 1
        return {"tool_calls": [{"id": f"call_{secrets.token_hex(12)}", "function": function}]}

    def _entry(self, scored: TokenLogprobs) -> JSON:
        return token_logprobs(self.tokenizer, scored, self.served.special_ids)

    def _end(self) -> JSON:
        (choice,), now = self.completion.choices, perf_counter()
        sequence = choice.sequence
        # A deadline has no name in Ollama.
        reason = "stop" if choice.finish_reason is FinishReason.STOP else "length"
        choice.shown_reason = reason
        scheduled, first = sequence.scheduled_at or now, sequence.first_token_at or now
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": nanoseconds(self._arrived, now),
            "load_duration": nanoseconds(self._arrived, scheduled),
            "prompt_eval_count": self.completion.n_prompt_tokens,
            "prompt_eval_duration": nanoseconds(scheduled, first),
            "eval_count": self.completion.n_completion_tokens,
            "eval_duration": nanoseconds(first, now),
        }
