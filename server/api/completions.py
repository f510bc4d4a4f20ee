"""OpenAI's completions: POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response

from server.api.openai import check_model, finite, usage
from server.api.responses import service_of, unless_disconnected
from server.api.schemas import CompletionsBody, parse
from server.api.sse import DONE, KEEP_ALIVE, EventStream, compact, event
from server.completion import Choice, Completion, CompletionRequest, Delta, draw_seed
from server.detokenizer import Detokenizer, token_text
from server.engine.sampling import TokenLogprobs
from server.service import Service

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = service_of(request)
    body = parse(CompletionsBody, await request.body())
    check_model(service, body.model)
    wanted = await _completion_request(service, body, request.state)
    answer = _Answer(service, body, request.state.request_id)
    if body.stream:
        return EventStream(_events(request, wanted, answer), last_words=DONE)
    return await unless_disconnected(request.receive, _whole(request, wanted, answer))


async def _completion_request(service: Service, body: CompletionsBody, state: State) -> CompletionRequest:
    service.admission.check_size(len(body.prompt) * body.n)  # before a million prompts are tokenised
    service.check_token_ids(body.stop_token_ids, "stop_token_ids")
    service.check_token_ids(map(int, body.logit_bias), "logit_bias")
    prompts = [await service.prompt(source, keep_last=body.truncate_prompt_tokens) for source in body.prompt]
    max_tokens = body.tokens_wanted
    if max_tokens is None:
        max_tokens = service.default_max_tokens(prompts, DEFAULT_MAX_TOKENS)
    params = body.sampling_params(
        service.bundle.generation.given(),
        max_tokens=max_tokens,
        seed=draw_seed() if body.seed is None else body.seed,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    deadline = service.deadline(state.arrived, body.timeout_ms)
    return CompletionRequest(
        prompts=prompts,
        params=params,
        request_id=state.request_id,
        n=body.n,
        stops=tuple(body.stop),
        deadline=deadline,
        priority=body.priority,
        grammar=body.grammar_wanted(),
    )


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


class _Answer:
    """The shape of one request's answer, whole or in chunks."""

    def __init__(self, service: Service, body: CompletionsBody, request_id: str) -> None:
        self.service = service
        self.tokenizer = service.bundle.tokenizer
        self.body = body
        self.head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time()),
            "model": service.settings.model_name,
        }
        self._prefix = compact(self.head)[:-1]
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._echoed: set[int] = set()

    def text_of(self, delta: Delta) -> str:
        """What the delta adds to the text, with the echoed prompt before the first."""
        if not self.body.echo or delta.choice.index in self._echoed:
            return delta.text
        self._echoed.add(delta.choice.index)
        return delta.choice.prompt.text + delta.text

    def logprobs_of(self, delta: Delta) -> _Logprobs | None:
        if self.body.logprobs is None:
            return None
        entries = _Logprobs()
        prompt = delta.choice.prompt
        if delta.prompt_logprobs is not None:
            self._add_prompt(entries, prompt.ids, delta.prompt_logprobs)
        if delta.logprobs is not None:
            self._add(entries, delta.logprobs, delta.offset + (len(prompt.text) if self.body.echo else 0))
        return entries

    def chunk(self, delta: Delta) -> bytes:
        """An event for one delta; none where it has nothing to show."""
        text, logprobs = self.text_of(delta), self.logprobs_of(delta)
        if not text and logprobs is None and delta.finish_reason is None:
            return b""
        shown = "null" if logprobs is None else compact(logprobs.json(with_top=bool(self.body.logprobs)))
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        usage = ',"usage":null' if self._with_usage else ""
        return event(
            f'{self._prefix},"choices":[{{"index":{delta.choice.index},"text":{compact(text)},'
            f'"logprobs":{shown},"finish_reason":{reason}}}]{usage}}}'
        )

    def tail(self, completion: Completion) -> bytes:
        if not self._with_usage:
            return DONE
        return event(compact({**self.head, "choices": [], "usage": usage(completion)})) + DONE

    def _add_prompt(self, entries: _Logprobs, ids: list[int], scored: list[TokenLogprobs]) -> None:
        text = Detokenizer(self.tokenizer)
        for position, token_id in enumerate(ids):
            if position:
                self._add(entries, scored[position - 1], text.n_chars)
            else:
                entries.extend(_Logprobs([token_text(self.tokenizer, token_id)], [None], [None], [0]))
            text.push(token_id)

    def _add(self, entries: _Logprobs, scored: TokenLogprobs, offset: int) -> None:
        entries.tokens.append(token_text(self.tokenizer, scored.token_id))
        entries.token_logprobs.append(finite(scored.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in (*scored.top, (scored.token_id, scored.logprob)):
            top.setdefault(token_text(self.tokenizer, token_id), finite(logprob))
        entries.top_logprobs.append(top)
        entries.text_offset.append(offset)


async def _events(request: Request, wanted: CompletionRequest, answer: _Answer) -> AsyncGenerator[bytes, None]:
    service = answer.service
    async with service.complete(wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas(service.settings.keep_alive_interval):
            if chunk := b"".join(map(answer.chunk, deltas)):
                yield chunk
            elif not deltas:
                yield KEEP_ALIVE
        yield answer.tail(completion)


async def _whole(request: Request, wanted: CompletionRequest, answer: _Answer) -> Response:
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, _Logprobs] = {}
    async with answer.service.complete(wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas():
            for delta in deltas:
                index = delta.choice.index
                texts.setdefault(index, []).append(answer.text_of(delta))
                if (entries := answer.logprobs_of(delta)) is not None:
                    logprobs.setdefault(index, _Logprobs()).extend(entries)
    choices = [_choice(choice, "".join(texts[choice.index]), logprobs, answer.body) for choice in completion.choices]
    return JSONResponse({**answer.head, "choices": choices, "usage": usage(completion)})


def _choice(choice: Choice, text: str, logprobs: dict[int, _Logprobs], body: CompletionsBody) -> dict[str, Any]:
    entries = logprobs.get(choice.index)
    return {
        "index": choice.index,
        "text": text,
        "logprobs": None if entries is None else entries.json(with_top=bool(body.logprobs)),
        "finish_reason": choice.finish_reason,
    }
