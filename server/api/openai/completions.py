"""OpenAI's completions: POST /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.openai.answers import Answer, check_body, completion_request, finite, respond
from server.api.responses import service_of
from server.api.schemas import CompletionsBody, parse
from server.api.sse import compact
from server.engine.sampling import TokenLogprobs
from server.requests.completion import Choice, Completion, Delta, Prompt
from server.requests.service import Service
from server.text.detokenizer import Detokenizer, token_name

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = service_of(request)
    body = parse(CompletionsBody, await request.body())
    check_body(service, body, len(body.prompt))
    wanted = completion_request(
        service,
        body,
        await service.prompts(
            body.prompt,
            keep_last=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens,
            with_places=body.echo and body.logprobs is not None,
        ),
        request.state,
        usual_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return await respond(request, wanted, _Answer(service, body, request.state.request_id))


@dataclass(slots=True)
class _Logprobs:
    """OpenAI's four parallel lists. `offset` is where generated text starts: behind the prompt where it is echoed."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: _Logprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def json(self, *, with_top: bool) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if with_top else None,
            "text_offset": self.text_offset,
        }


class _Answer(Answer):
    def __init__(self, service: Service, body: CompletionsBody, request_id: str) -> None:
        super().__init__(service, body, f"cmpl-{request_id}", "text_completion")
        self._body = body
        self._echoed: set[int] = set()
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, _Logprobs] = {}

    def chunk(self, completion: Completion, delta: Delta) -> bytes:
        text, logprobs = self._text_of(delta), self._logprobs_of(delta)
        if not text and logprobs is None and delta.finish_reason is None:
            return b""
        shown = (
            "null"
            if logprobs is None
            else compact(logprobs.json(with_top=bool(self._body.logprobs)))
        )
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return self.event(
            completion,
            f'{{"index":{delta.choice.index},"text":{compact(text)},"logprobs":{shown},"finish_reason":{reason}}}',
        )

    def add(self, _completion: Completion, delta: Delta) -> None:
        index = delta.choice.index
        self._texts.setdefault(index, []).append(self._text_of(delta))
        if (entries := self._logprobs_of(delta)) is not None:
            self._logprobs.setdefault(index, _Logprobs()).extend(entries)

    def choice(self, choice: Choice) -> dict[str, Any]:
        entries = self._logprobs.get(choice.index)
        return {
            "index": choice.index,
            "text": "".join(self._texts[choice.index]),
            "logprobs": None
            if entries is None
            else entries.json(with_top=bool(self._body.logprobs)),
            "finish_reason": choice.finish_reason,
        }

    def _text_of(self, delta: Delta) -> str:
        """What the delta adds to the text, with the echoed prompt before the first."""
        if not self._body.echo or delta.choice.index in self._echoed:
            return delta.text
        self._echoed.add(delta.choice.index)
        return delta.choice.prompt.text + delta.text

    def _logprobs_of(self, delta: Delta) -> _Logprobs | None:
        if self._body.logprobs is None:
            return None
        entries = _Logprobs()
        prompt = delta.choice.prompt
        if delta.prompt_logprobs is not None:
            self._add_prompt(entries, prompt, delta.prompt_logprobs)
        if delta.logprobs is not None:
            self._add(
                entries, delta.logprobs, delta.offset + (len(prompt.text) if self._body.echo else 0)
            )
        return entries

    def _add_prompt(self, entries: _Logprobs, prompt: Prompt, scored: list[TokenLogprobs]) -> None:
        places = prompt.places or self._places(prompt.ids)
        first = token_name(self.tokenizer, prompt.ids[0])
        entries.extend(_Logprobs([first], [None], [None], [places[0]]))
        for token, place in zip(scored, places[1:], strict=True):
            self._add(entries, token, place)

    def _places(self, ids: list[int]) -> list[int]:
        """In the text that the tokens decode to."""
        text = Detokenizer(self.tokenizer)
        places = []
        for token_id in ids:
            places.append(text.n_chars)
            text.push(token_id)
        return places

    def _add(self, entries: _Logprobs, scored: TokenLogprobs, offset: int) -> None:
        name, logprob = token_name(self.tokenizer, scored.token_id), finite(scored.logprob)
        top: dict[str, float] = {}
        for token_id, other in scored.top:
            top.setdefault(token_name(self.tokenizer, token_id), finite(other))
        entries.tokens.append(name)
        entries.token_logprobs.append(logprob)
        entries.top_logprobs.append(top | {name: logprob})  # also where two tokens have one text
        entries.text_offset.append(offset)
