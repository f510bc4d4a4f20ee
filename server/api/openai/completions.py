"""OpenAI's completions: POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api import responses
from server.api.openai import answers
from server.api.openai.formatting import OpenAIFormatter
from server.api.openai.schemas import CompletionsBody
from server.api.responses import compact, finite
from server.api.schemas import BodyRoute, check_model
from server.engine.sampling import TokenLogprobs
from server.requests.completion import Choice, Delta, Prompt
from server.requests.service import Service
from server.text.detokenizer import Detokenizer, token_name

router = APIRouter(route_class=BodyRoute)

DEFAULT_MAX_TOKENS = 16


@router.post(
    "/v1/completions",
    summary="Continue prompts, as OpenAI does.",
    response_model=answers.Completion,
    responses=responses.GENERATE_ERRORS | responses.streamed(answers.CompletionEvent),
)
async def completions(request: Request, body: CompletionsBody) -> Response:
    """Continue prompts."""
    service, state = responses.service_of(request), responses.state_of(request.scope)
    check_model(service, body.model)
    options = body.options(
        body.prompt,
        service.bundle.generation,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    options = replace(
        options,
        add_special_tokens=body.add_special_tokens,
        with_offsets=body.echo and body.logprobs is not None,
    )
    wanted = await service.builder.build(options, state)
    formatter = CompletionFormatter(service, body, state.id)
    return await responses.respond(request, wanted, formatter, stream=body.stream)


class _Entry(NamedTuple):
    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int  # in the text: behind the prompt if it is echoed


class CompletionFormatter(OpenAIFormatter):
    """The form of a text completion's response."""

    def __init__(self, service: Service, body: CompletionsBody, request_id: str) -> None:
        super().__init__(service, body, f"cmpl-{request_id}", "text_completion")
        self._body = body
        self._echoed: set[int] = set()
        self._deltas: dict[int, list[Delta]] = {}  # of a whole answer, by choice

    def events(self, delta: Delta) -> bytes:
        """Return the event for a delta, if it has anything to show."""
        text, logprobs = self._text(delta), self._json(self._new_entries(delta))
        if not text and logprobs is None and delta.finish_reason is None:
            return b""
        shown = "null" if logprobs is None else compact(logprobs)
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        choice = f'"index":{delta.choice.index},"text":{compact(text)},"logprobs":{shown}'
        return self.event(f'{{{choice},"finish_reason":{reason}}}')

    def add(self, delta: Delta) -> None:
        """Keep a delta for its choice."""
        self._deltas.setdefault(delta.choice.index, []).append(delta)

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice."""
        deltas = self._deltas[choice.index]
        entries = [entry for delta in deltas for entry in self._new_entries(delta)]
        return {
            "index": choice.index,
            "text": "".join(map(self._text, deltas)),
            "logprobs": self._json(entries),
            "finish_reason": choice.finish_reason,
        }

    def _text(self, delta: Delta) -> str:
        """Return a delta's text, after the echoed prompt if it is the choice's first."""
        if not self._body.echo or delta.choice.index in self._echoed:
            return delta.text
        self._echoed.add(delta.choice.index)
        return delta.choice.prompt.text + delta.text

    def _json(self, entries: list[_Entry]) -> dict[str, Any] | None:
        """Return OpenAI's four parallel lists; None unless log-probabilities were asked for."""
        if self._body.logprobs is None:
            return None
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [entry.top for entry in entries] if self._body.logprobs else None,
            "text_offset": [entry.offset for entry in entries],
        }

    def _new_entries(self, delta: Delta) -> list[_Entry]:
        if self._body.logprobs is None:
            return []
        entries = []
        prompt = delta.choice.prompt
        if delta.prompt_logprobs is not None:
            offsets = prompt.offsets or self._decoded_offsets(prompt)
            first = token_name(self.tokenizer, prompt.ids[0])
            entries.append(_Entry(first, None, None, offsets[0]))
            scored = zip(delta.prompt_logprobs, offsets[1:], strict=True)
            entries += [self._entry(token, offset) for token, offset in scored]
        if delta.logprobs is not None:
            n_echoed = len(prompt.text) if self._body.echo else 0
            entries.append(self._entry(delta.logprobs, delta.offset + n_echoed))
        return entries

    def _decoded_offsets(self, prompt: Prompt) -> list[int]:
        """Return where each token begins in the text that the tokens decode to."""
        text = Detokenizer(self.tokenizer)
        offsets = []
        for token_id in prompt.ids:
            offsets.append(text.n_chars)
            text.push(token_id)
        return offsets

    def _entry(self, scored: TokenLogprobs, offset: int) -> _Entry:
        name, logprob = token_name(self.tokenizer, scored.token_id), finite(scored.logprob)
        top: dict[str, float] = {}
        for token_id, other in scored.top:
            top.setdefault(token_name(self.tokenizer, token_id), finite(other))
        # The token itself is in its place, even if another has the same text.
        return _Entry(name, logprob, top | {name: logprob}, offset)
