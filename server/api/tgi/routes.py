"""The routes of Hugging Face's TGI: /generate, /generate_stream, POST / and /info."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from statistics import fmean
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.server.api.embeddings.tei import EncoderInfo, encoder_info
from kvasir.server.api.http import responses, streams
from kvasir.server.api.http.body import TextRoute
from kvasir.server.api.http.pieces import LazyList, compact
from kvasir.server.api.http.responses import GENERATE_ERRORS, STREAMED, finite
from kvasir.server.api.structured import tgi_grammar
from kvasir.server.api.tgi.schemas import CompatibleBody, GenerateBody, Generated, Info
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.engine.sequence import FinishReason
from kvasir.server.errors import InvalidRequestError, ModelNotFoundError
from kvasir.server.requests.completion import Choice, Delta
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.detokenizer import token_text

router = APIRouter(route_class=TextRoute)

DEFAULT_MAX_NEW_TOKENS = 100


@router.post("/generate", response_model=Generated, responses=GENERATE_ERRORS)
async def generate(request: Request, body: GenerateBody) -> Response:
    """Continue a text, as TGI does."""
    return await _generate(request, body)


@router.post("/generate_stream", response_class=Response, responses=STREAMED)
async def generate_stream(request: Request, body: GenerateBody) -> Response:
    """Continue a text as a stream."""
    return await _generate(request, body, stream=True)


@router.post("/", response_model=list[Generated], responses=STREAMED)
async def generate_either(request: Request, body: CompatibleBody) -> Response:
    """Continue a text; stream if `stream` is true. For TGI's clients that know a base URL only."""
    return await _generate(request, body, stream=body.stream)


async def _generate(request: Request, body: GenerateBody, *, stream: bool = False) -> Response:
    parameters = body.parameters
    if stream and parameters.decoder_input_details:
        raise InvalidRequestError(
            "decoder_input_details is not available on a stream; use /generate", param="parameters"
        )
    n_samples = parameters.best_of or 1
    if n_samples > 1 and stream:
        raise InvalidRequestError(
            "parameters.best_of: one of several cannot be streamed; use /generate",
            param="parameters",
        )
    if n_samples > 1 and not parameters.samples:
        raise InvalidRequestError(
            "parameters.best_of: greedy texts are all the same; set do_sample", param="parameters"
        )
    served, state = responses.served_model(request), responses.state_of(request.scope)
    if parameters.adapter_id is not None:
        served = _adapter(request, parameters.adapter_id)
    grammar, form = None, parameters.grammar
    if form is not None:
        work = partial(tgi_grammar, form, "parameters.grammar")
        grammar = await served.text_worker.call(state.body_size, work)
    changes = {} if parameters.samples else {"temperature": 0.0}
    options = parameters.model_copy(update=changes).request_options(
        [body.inputs],
        logprobs=parameters.top_n_tokens,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        max_tokens=parameters.max_new_tokens,
        n=n_samples,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        grammar=grammar,
        target=parameters.target(),
        keep_last=parameters.truncate,
        shows_prompt=parameters.return_full_text,
        field_prefix="parameters.",
    )
    wanted = await served.builder.build(options, state)
    formatter = GenerateFormatter(served, body)
    return streams.respond(request, wanted, formatter, stream=stream)


def _adapter(request: Request, name: str) -> ServedModel:
    """Return an adapter of the request's model. Raises ModelNotFoundError for an unknown one."""
    served = responses.models_of(request.scope).adapter(name)
    state = responses.state_of(request.scope)
    if served is None or served.parent.name != state.model or state.adapter not in ("", name):
        known = f"{state.adapter or state.model!r} has no adapter {name[:100]!r}"
        raise ModelNotFoundError(f"parameters.adapter_id: {known}", param="parameters.adapter_id")
    responses.note_model(request.scope, served)
    return served


_Scored = tuple[TokenLogprobs, str]  # with its text


@dataclass
class _Shown:
    """The text and tokens of one sample so far."""

    choice: Choice
    text: str = ""
    scored: list[_Scored] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def score(self) -> float:
        """The mean log-probability of its tokens."""
        scores = [finite(scored.logprob) for scored, _ in self.scored]
        return fmean(scores) if scores else -math.inf


class GenerateFormatter(streams.Formatter):
    """The form of TGI's responses, whose choices are samples of one prompt."""

    def __init__(self, served: ServedModel, body: GenerateBody) -> None:
        super().__init__(served)
        self._parameters = body.parameters
        self._as_list = isinstance(body, CompatibleBody)
        self._samples: dict[int, _Shown] = {}

    def parts(self, delta: Delta) -> Iterator[Delta]:
        """Keep a delta's text and tokens; yield it, for the form takes time."""
        shown = self._samples.setdefault(delta.choice.index, _Shown(delta.choice))
        shown.text += delta.text
        if delta.prompt_logprobs is not None:
            shown.prompt_logprobs = delta.prompt_logprobs
        if delta.logprobs is not None:
            shown.scored.append((delta.logprobs, delta.text))
        yield delta

    def event(self, delta: Delta) -> bytes:
        """Return the event for a delta; the last one has the whole text."""
        sample = self._samples[delta.choice.index]
        token: dict[str, Any] = {"id": 0, "text": delta.text, "logprob": 0.0}
        token["special"] = not delta.text
        if delta.logprobs is not None:  # else a deadline or a beam search ended without a token
            token = self._shown_token(sample.scored[-1])
        shown: dict[str, Any] = {"index": len(sample.scored), "token": token}
        if self._parameters.top_n_tokens:
            shown["top_tokens"] = self._top_tokens(sample.scored[-1]) if sample.scored else []
        shown |= {"generated_text": None, "details": None}
        if delta.finish_reason is not None:
            details = self._details(sample)
            shown |= {"generated_text": self._text(sample), "details": details}
        # Without a space, as TGI writes it: some of its clients cut off five characters.
        return f"data:{compact(shown)}\n\n".encode()

    def whole(self) -> Any:
        """Return the body of a finished completion: its likeliest sample."""
        parameters = self._parameters
        best, *rest = sorted(self._samples.values(), key=lambda it: it.score, reverse=True)
        shown: dict[str, Any] = {"generated_text": self._text(best)}
        details = [self._whole_details(sample) for sample in (best, *rest)]  # names the reasons
        if parameters.details or parameters.decoder_input_details:
            shown["details"] = details[0]
            if rest:
                shown["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(sample), **about}
                    for sample, about in zip(rest, details[1:], strict=True)
                ]
        return [shown] if self._as_list else shown

    def _text(self, sample: _Shown) -> str:
        lead = sample.choice.prompt.text if self._parameters.return_full_text else ""
        return lead + sample.text

    def _whole_details(self, sample: _Shown) -> dict[str, Any]:
        scored, n_top = sample.scored, self._parameters.top_n_tokens
        prefill = []
        if sample.prompt_logprobs is not None:
            scores = [None, *sample.prompt_logprobs]
            prefill = [*zip(sample.choice.prompt.ids, scores, strict=True)]
        shown = {
            "prefill": LazyList(prefill, self._prefilled),
            "tokens": LazyList(scored, self._shown_token),
        }
        tops = {"top_tokens": LazyList(scored, self._top_tokens, n_top)} if n_top else {}
        return self._details(sample) | shown | tops

    def _details(self, sample: _Shown) -> dict[str, Any]:
        choice = sample.choice
        reason = "length"  # also at the deadline, for which TGI has no name
        if choice.stops.stopped:
            reason = "stop_sequence"
        elif choice.finish_reason is FinishReason.STOP:
            reason = "eos_token"
        choice.shown_reason = reason
        details = {
            "finish_reason": reason,
            "generated_tokens": choice.n_tokens,
            "seed": choice.sequence.params.seed if self._parameters.samples else None,
            "input_length": len(choice.prompt.ids),
        }
        return details if choice.score is None else details | {"score": finite(choice.score)}

    def _prefilled(self, token: tuple[int, TokenLogprobs | None]) -> dict[str, Any]:
        token_id, scored = token
        logprob = None if scored is None else finite(scored.logprob)
        text = token_text(self.tokenizer, token_id)
        return {"id": token_id, "text": text, "logprob": logprob}

    def _shown_token(self, scored_text: _Scored) -> dict[str, Any]:
        scored, text = scored_text
        token = self._token(scored.token_id, scored.logprob)
        return token if token["special"] else token | {"text": text}

    def _top_tokens(self, scored_text: _Scored) -> list[dict[str, Any]]:
        scored, _ = scored_text
        return [self._token(i, logprob) for i, logprob in scored.top]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "text": token_text(self.tokenizer, token_id),
            "logprob": finite(logprob),
            "special": token_id in self.served.special_ids,
        }


@router.get("/info", responses=responses.MODEL_ERRORS)
async def info(served: responses.NamedModel) -> Info | EncoderInfo:
    """Return model and limits, in TGI's form; those of an encoder in TEI's."""
    model, limits = served.describe_model(), served.builder.limits
    n_sequences = served.admission.capacity
    if served.task != "generate":
        return encoder_info(served, max_concurrent_requests=n_sequences)
    return Info(
        model_id=model["model"],
        model_dtype=model["precision"],
        model_device_type=model["device"],
        model_pipeline_tag="text2text-generation" if limits.max_source_len else "text-generation",
        max_concurrent_requests=n_sequences,
        max_input_tokens=limits.max_source_len or limits.max_model_len - 1,
        max_total_tokens=limits.max_model_len + (limits.max_source_len or 0),
        max_client_batch_size=n_sequences,
        version=version("kvasir-lm"),
    )
