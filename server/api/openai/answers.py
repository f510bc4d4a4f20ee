"""What OpenAI's routes have in common: from a body to a request, from deltas to an answer, whole or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Container
from time import time
from typing import Any

from fastapi import Request
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response

from server.api.responses import unless_disconnected
from server.api.schemas import OpenAIBody
from server.api.sse import DONE, KEEP_ALIVE, EventStream, compact, event
from server.errors import ModelNotFoundError
from server.requests.completion import (
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    Prompt,
    draw_seed,
)
from server.requests.service import Service

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_WHICHEVER = (
    None,
    "dummy",
    "tgi",
)  # as huggingface_hub and TGI's users call what a server happens to serve


def check_model(
    service: Service, name: str | None, others: Container[str | None] = _WHICHEVER
) -> None:
    """Raises ModelNotFoundError for a name that is neither the served model's nor one of the others."""
    served = service.settings.model_name
    if name != served and name not in others:
        raise ModelNotFoundError(
            f"the model {name!r} is not served here; {served!r} is", param="model"
        )


def check_body(service: Service, body: OpenAIBody, n_prompts: int) -> None:
    """Refuse what can be told before prompts are tokenised."""
    check_model(service, body.model)
    service.admission.check_size(n_prompts * body.n)
    service.check_token_ids(body.stop_token_ids, "stop_token_ids")
    service.check_token_ids(map(int, body.logit_bias), "logit_bias")


def completion_request(
    service: Service,
    body: OpenAIBody,
    prompts: list[Prompt],
    state: State,
    *,
    usual_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    **changes: Any,
) -> CompletionRequest:
    """`usual_tokens`: to generate where the body does not say how many. `changes`: other fields of the request."""
    max_tokens = body.tokens_wanted
    if max_tokens is None:
        max_tokens = service.default_max_tokens(prompts, usual_tokens)
    params = body.sampling_params(
        service.bundle.generation.given(),
        max_tokens=max_tokens,
        seed=draw_seed() if body.seed is None else body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    fields: dict[str, Any] = {
        "request_id": state.request_id,
        "n": body.n,
        "stops": tuple(body.stop),
        "deadline": service.deadline(state.arrived, body.timeout_ms),
        "priority": body.priority,
        "grammar": body.grammar_wanted(),
    }
    return CompletionRequest(prompts=prompts, params=params, **(fields | changes))


class Answer(ABC):
    """The shape of one request's answer: `chunk` where it is streamed, otherwise `add` and, at the end, `choice`."""

    def __init__(self, service: Service, body: OpenAIBody, id_: str, kind: str) -> None:
        self.service = service
        self.tokenizer = service.bundle.tokenizer
        self.is_stream = body.stream
        self._with_usage = body.wants_usage_chunk
        self._with_running_usage = body.wants_running_usage
        self._n_shown = 0  # tokens of the deltas so far; more may have been generated
        self._head = {
            "id": id_,
            "object": kind,
            "created": int(time()),
            "model": service.settings.model_name,
        }
        self._prefix = compact(self._head)[:-1]

    def next_chunk(self, completion: Completion, delta: Delta) -> bytes:
        self._n_shown += delta.token_id is not None
        return self.chunk(completion, delta)

    @abstractmethod
    def chunk(self, completion: Completion, delta: Delta) -> bytes:
        """The events for one delta; none where it has nothing to show."""

    @abstractmethod
    def add(self, completion: Completion, delta: Delta) -> None:
        """Keep what a delta adds."""

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """A choice that has finished, of whatever was added."""

    def event(self, completion: Completion, choice: str) -> bytes:
        """An event with one choice, given in JSON."""
        usage = ""
        if self._with_usage:
            usage = f',"usage":{compact(_usage(completion, self._n_shown)) if self._with_running_usage else "null"}'
        return event(f'{self._prefix},"choices":[{choice}]{usage}}}')

    def tail(self, completion: Completion) -> bytes:
        if not self._with_usage:
            return DONE
        return (
            event(
                compact(
                    {
                        **self._head,
                        "choices": [],
                        "usage": _usage(completion, completion.n_completion_tokens),
                    }
                )
            )
            + DONE
        )

    def whole(self, completion: Completion) -> dict[str, Any]:
        choices = [self.choice(choice) for choice in completion.choices]
        return {
            **self._head,
            "choices": choices,
            "usage": _usage(completion, completion.n_completion_tokens),
        }


async def respond(request: Request, wanted: CompletionRequest, answer: Answer) -> Response:
    if answer.is_stream:
        return EventStream(_events(request, wanted, answer), last_words=DONE)
    return await unless_disconnected(request.receive, _whole(request, wanted, answer))


async def _events(
    request: Request, wanted: CompletionRequest, answer: Answer
) -> AsyncGenerator[bytes, None]:
    service = answer.service
    async with service.complete(wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas(service.settings.keep_alive_interval):
            if chunk := b"".join(answer.next_chunk(completion, delta) for delta in deltas):
                yield chunk
            elif not deltas:
                yield KEEP_ALIVE
        yield answer.tail(completion)


async def _whole(request: Request, wanted: CompletionRequest, answer: Answer) -> Response:
    async with answer.service.complete(wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas():
            for delta in deltas:
                answer.add(completion, delta)
    return JSONResponse(answer.whole(completion))


def finite(logprob: float) -> float:
    return max(_LOWEST_LOGPROB, logprob)  # in this order NaN is replaced too


def _usage(completion: Completion, generated: int) -> dict[str, Any]:
    prompt = completion.n_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": completion.n_cached_tokens},
    }
