"""TGI's routes (Hugging Face text-generation-inference): /generate, /generate_stream, POST / and /info."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from server.api.openai.answers import finite
from server.api.responses import service_of, unless_disconnected
from server.api.schemas import MAX_STOPS, GenerateBody, parse
from server.api.sse import KEEP_ALIVE, EventStream, compact, tight_event
from server.engine.sampling import TokenLogprobs
from server.engine.sequence import FinishReason
from server.errors import InvalidRequestError
from server.requests.completion import Choice, CompletionRequest, Delta, draw_seed
from server.requests.service import Service
from server.text.detokenizer import token_text

router = APIRouter()

DEFAULT_MAX_NEW_TOKENS = 100


class CompatibleBody(GenerateBody):
    """POST /, where clients that know only a base URL send everything."""

    stream: bool = Field(False, description="Server-sent events, as /generate_stream sends them.")


@router.post("/generate")
async def generate(request: Request) -> Response:
    answer = await _read(request, parse(GenerateBody, await request.body()))
    return JSONResponse(await unless_disconnected(request.receive, _whole(request, answer)))


@router.post("/generate_stream")
async def generate_stream(request: Request) -> Response:
    return await _stream(request, parse(GenerateBody, await request.body()))


@router.post("/")
async def generate_either(request: Request) -> Response:
    body = parse(CompatibleBody, await request.body())
    if body.stream:
        return await _stream(request, body)
    answer = await _read(request, body)
    return JSONResponse([await unless_disconnected(request.receive, _whole(request, answer))])


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    service = service_of(request)
    model = service.describe_model()
    n_sequences = service.settings.max_num_seqs + service.settings.queue_limit
    return {
        "model_id": model["model"],
        "model_sha": None,
        "model_dtype": model["precision"],
        "model_device_type": model["device"],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": n_sequences,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": service.max_model_len - 1,
        "max_total_tokens": service.max_model_len,
        "validation_workers": 1,
        "max_client_batch_size": n_sequences,
        "router": "kvasir",
        "version": version("kvasir-lm"),
        "sha": None,
        "docker_label": None,
    }


async def _stream(request: Request, body: GenerateBody) -> Response:
    if body.parameters.decoder_input_details:
        raise InvalidRequestError(
            "decoder_input_details is not available on a stream; use /generate", param="parameters"
        )
    return EventStream(_events(request, await _read(request, body)))


async def _read(request: Request, body: GenerateBody) -> _Answer:
    service = service_of(request)
    parameters = body.parameters
    service.check_token_ids(parameters.stop_token_ids, "parameters.stop_token_ids")
    service.check_token_ids(map(int, parameters.logit_bias), "parameters.logit_bias")
    prompts = [await service.prompt(body.inputs, keep_last=parameters.truncate)]
    max_tokens = parameters.max_new_tokens
    if max_tokens is None:
        max_tokens = service.default_max_tokens(prompts, DEFAULT_MAX_NEW_TOKENS)
    changes = {} if parameters.samples else {"temperature": 0.0}
    params = parameters.sampling_params(
        {},  # TGI's own defaults say when to sample at all
        max_tokens=max_tokens,
        seed=draw_seed() if parameters.seed is None else parameters.seed,
        logprobs=parameters.top_n_tokens,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        **changes,
    )
    deadline = service.deadline(request.state.arrived, parameters.timeout_ms)
    wanted = CompletionRequest(
        prompts=prompts,
        params=params,
        request_id=request.state.request_id,
        stops=tuple(parameters.stop),
        deadline=deadline,
        priority=parameters.priority,
        grammar=parameters.grammar_wanted(),
    )
    return _Answer(service, body, wanted)


class _Answer:
    """The shape of one request's answer, whole or in events. There is one choice, and its text is kept."""

    def __init__(self, service: Service, body: GenerateBody, wanted: CompletionRequest) -> None:
        self.service = service
        self.tokenizer = service.bundle.tokenizer
        self.parameters = body.parameters
        self.wanted = wanted
        self.text = wanted.prompts[0].text if body.parameters.return_full_text else ""
        self.tokens: list[dict[str, Any]] = []
        self.top_tokens: list[list[dict[str, Any]]] = []
        self.prefill: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.prompt_logprobs is not None:
            ids = self.wanted.prompts[0].ids
            logprobs = [None, *(finite(scored.logprob) for scored in delta.prompt_logprobs)]
            self.prefill = [
                {"id": i, "text": token_text(self.tokenizer, i), "logprob": p}
                for i, p in zip(ids, logprobs, strict=True)
            ]
        if delta.logprobs is not None:
            self.tokens.append(self._token(delta, delta.logprobs))
            self.top_tokens.append(
                [self._entry(i, token_text(self.tokenizer, i), p) for i, p in delta.logprobs.top]
            )

    def event(self, delta: Delta) -> bytes:
        """The event of one delta, which has been added. The last one carries the whole text."""
        if delta.logprobs is None:  # ended without a token: by its deadline
            token: dict[str, Any] = {"id": 0, "text": delta.text, "logprob": 0.0, "special": True}
        else:
            token = self.tokens[-1]
        shown: dict[str, Any] = {"index": len(self.tokens), "token": token}
        if self.parameters.top_n_tokens:
            shown["top_tokens"] = self.top_tokens[-1] if self.top_tokens else []
        ended = delta.finish_reason is not None
        shown["generated_text"] = self.text if ended else None
        shown["details"] = self.summary(delta.choice) if ended else None
        return tight_event(compact(shown))

    def summary(self, choice: Choice) -> dict[str, Any]:
        return {
            "finish_reason": _finish_reason(choice),
            "generated_tokens": choice.n_tokens,
            "seed": self.wanted.params.seed if self.parameters.samples else None,
            "input_length": len(choice.prompt.ids),
        }

    def details(self, choice: Choice) -> dict[str, Any]:
        details = self.summary(choice) | {"prefill": self.prefill, "tokens": self.tokens}
        if self.parameters.top_n_tokens:
            details["top_tokens"] = self.top_tokens
        return details

    def _token(self, delta: Delta, scored: TokenLogprobs) -> dict[str, Any]:
        special = scored.token_id in self.service.special_ids
        text = token_text(self.tokenizer, scored.token_id) if special else delta.text
        return self._entry(scored.token_id, text, scored.logprob)

    def _entry(self, token_id: int, text: str, logprob: float) -> dict[str, Any]:
        special = token_id in self.service.special_ids
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}


async def _events(request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    async with answer.service.complete(answer.wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas(answer.service.settings.keep_alive_interval):
            for delta in deltas:
                answer.add(delta)
                yield answer.event(delta)
            if not deltas:
                yield KEEP_ALIVE


async def _whole(request: Request, answer: _Answer) -> dict[str, Any]:
    async with answer.service.complete(answer.wanted) as completion:
        request.state.completion = completion
        async for deltas in completion.deltas():
            for delta in deltas:
                answer.add(delta)
    shown: dict[str, Any] = {"generated_text": answer.text}
    if answer.parameters.details or answer.parameters.decoder_input_details:
        shown["details"] = answer.details(completion.choices[0])
    return shown


def _finish_reason(choice: Choice) -> str:
    """In TGI's words, which know no deadline."""
    if choice.stopped_by_string:
        return "stop_sequence"
    return "eos_token" if choice.finish_reason is FinishReason.STOP else "length"
