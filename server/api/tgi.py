"""The routes of Hugging Face's TGI: /generate, /generate_stream, POST / and /info."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, Json
from starlette.responses import Response

from server.api import schemas
from server.api.http import responses
from server.api.http.responses import GENERATE_ERRORS, compact, finite, streamed
from server.api.target import TargetFields
from server.engine.sampling import MAX_LOGPROBS
from server.engine.sequence import FinishReason
from server.errors import InvalidRequestError
from server.requests.completion import Choice, Delta
from server.requests.service import Service
from server.text.detokenizer import token_text

router = APIRouter(route_class=schemas.TextRoute)

DEFAULT_MAX_NEW_TOKENS = 100


class GenerateParameters(schemas.SamplingFields, TargetFields):
    """The `parameters` of a request, which samples only if one of them asks for it."""

    max_new_tokens: schemas.Count | None = Field(
        None,
        ge=1,
        description="Maximum number of new tokens. Default: 100, or the room left; for "
        "encoder-decoders the longest target.",
    )
    do_sample: bool = Field(False, description="Sample, even if no other field asks for it.")
    return_full_text: bool = Field(False, description="Begin the text with the prompt.")
    details: bool = Field(
        False, description="Return tokens, log-probabilities and the finish reason."
    )
    decoder_input_details: bool = Field(
        False, description="Return the prompt's tokens too; not available on a stream."
    )
    top_n_tokens: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description="Number of alternatives to return for each token."
    )
    truncate: schemas.KeepLast = None
    grammar: schemas.TGIFormat | None = Field(
        None,
        description="`json` or `json_object` with a schema as `value`, `regex`, or `json_schema` "
        "with `value.schema`.",
    )

    @property
    def samples(self) -> bool:
        """True to sample, False to decode greedily."""
        is_cut = self.top_k > 0 or min(self.top_p, self.typical_p) < 1.0 or self.min_p > 0.0
        return (self.do_sample or is_cut or self.temperature != 1.0) and self.temperature > 0.0


class GenerateBody(schemas.RequestBody):
    """The body of POST /generate and /generate_stream."""

    model: schemas.ModelName = None
    inputs: str = Field(description="The text to continue.")
    parameters: GenerateParameters = Field(
        default_factory=lambda: GenerateParameters.model_validate({}), description="See below."
    )


class CompatibleBody(GenerateBody):
    """The body of POST /, for clients that know only a base URL."""

    stream: bool = Field(False, description="Answer with server-sent events, as /generate_stream.")


class GenerateError(schemas.ResponseBody):
    """An error of TGI's routes."""

    error: str
    error_type: str


class PrefillToken(schemas.ResponseBody):
    """A token of the prompt."""

    id: schemas.Size
    text: str
    logprob: schemas.Logprob | None


class Token(schemas.ResponseBody):
    """A generated token."""

    id: schemas.Size
    text: str
    logprob: schemas.Logprob
    special: bool


class StreamDetails(schemas.ResponseBody):
    """Details in the last event of a stream."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: schemas.Size
    seed: int | None = Field(description="Null for greedy decoding.")
    input_length: schemas.Size
    score: float | None = Field(None, description="Of a beam search: see `length_penalty`.")


class Details(StreamDetails):
    """Details of a whole answer."""

    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class Generated(schemas.ResponseBody):
    """The response of /generate."""

    generated_text: str
    details: Details | None = None


class GeneratedToken(schemas.ResponseBody):
    """The data of an event; the last event of a stream has the text and the details."""

    index: schemas.Size
    token: Token
    top_tokens: list[Token] | None = None
    generated_text: str | None
    details: StreamDetails | None


class GenerateEvent(BaseModel):
    """A server-sent event. An error after the first event is an event too."""

    data: Json[GeneratedToken | GenerateError]


class Info(schemas.ResponseBody, json_schema_serialization_defaults_required=True):
    """The response of /info."""

    model_id: str
    model_sha: None = None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation", "text2text-generation"] = "text-generation"
    max_concurrent_requests: schemas.Size
    max_best_of: schemas.Size = 1
    max_stop_sequences: schemas.Size = schemas.MAX_STOPS
    max_input_tokens: schemas.Size
    max_total_tokens: schemas.Size
    validation_workers: schemas.Size = 1
    max_client_batch_size: schemas.Size
    router: Literal["kvasir"] = "kvasir"
    version: str
    sha: None = None
    docker_label: None = None


@router.post("/generate", response_model=Generated, responses=GENERATE_ERRORS)
async def generate(request: Request, body: GenerateBody) -> Response:
    """Continue a text, as TGI does."""
    return await _generate(request, body)


@router.post("/generate_stream", response_class=Response, responses=streamed(GenerateEvent))
async def generate_stream(request: Request, body: GenerateBody) -> Response:
    """Continue a text as a stream."""
    return await _generate(request, body, stream=True)


@router.post("/", response_model=list[Generated], responses=streamed(GenerateEvent))
async def generate_either(request: Request, body: CompatibleBody) -> Response:
    """Continue a text; stream if `stream` is true. For TGI's clients that know a base URL only."""
    return await _generate(request, body, stream=body.stream)


async def _generate(request: Request, body: GenerateBody, *, stream: bool = False) -> Response:
    parameters = body.parameters
    if stream and parameters.decoder_input_details:
        raise InvalidRequestError(
            "decoder_input_details is not available on a stream; use /generate", param="parameters"
        )
    service, state = responses.service_of(request), responses.state_of(request.scope)
    grammar, form = None, parameters.grammar
    if form is not None:
        work = partial(schemas.tgi_grammar, form, "parameters.grammar")
        grammar = await service.text_worker.call(state.body_size, work)
    changes = {} if parameters.samples else {"temperature": 0.0}
    options = parameters.model_copy(update=changes).request_options(
        [body.inputs],
        logprobs=parameters.top_n_tokens,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        max_tokens=parameters.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        grammar=grammar,
        target=parameters.target(),
        keep_last=parameters.truncate,
        field_prefix="parameters.",
    )
    wanted = await service.builder.build(options, state)
    formatter = GenerateFormatter(service, body)
    return responses.respond(request, wanted, formatter, stream=stream)


class GenerateFormatter(responses.Formatter):
    """The form of TGI's responses, which have one choice."""

    def __init__(self, service: Service, body: GenerateBody) -> None:
        super().__init__(service)
        self._parameters = body.parameters
        self._as_list = isinstance(body, CompatibleBody)
        self._text = ""
        self._tokens: list[dict[str, Any]] = []
        self._top_tokens: list[list[dict[str, Any]]] = []
        self._prefill: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        """Keep a delta's text and tokens."""
        self._text += delta.text
        if delta.prompt_logprobs is not None:
            logprobs = [None, *(finite(scored.logprob) for scored in delta.prompt_logprobs)]
            self._prefill = [
                {"id": i, "text": token_text(self.tokenizer, i), "logprob": p}
                for i, p in zip(delta.choice.prompt.ids, logprobs, strict=True)
            ]
        if (scored := delta.logprobs) is not None:
            token = self._token(scored.token_id, scored.logprob)
            self._tokens.append(token if token["special"] else token | {"text": delta.text})
            self._top_tokens.append([self._token(i, logprob) for i, logprob in scored.top])

    def chunk(self, delta: Delta) -> bytes:
        """Return the event for a delta; the last one has the whole text."""
        self.add(delta)
        token: dict[str, Any] = {"id": 0, "text": delta.text, "logprob": 0.0}
        token["special"] = not delta.text
        if delta.logprobs is not None:  # else a deadline or a beam search ended without a token
            token = self._tokens[-1]
        shown: dict[str, Any] = {"index": len(self._tokens), "token": token}
        if self._parameters.top_n_tokens:
            shown["top_tokens"] = self._top_tokens[-1] if self._top_tokens else []
        shown |= {"generated_text": None, "details": None}
        if delta.finish_reason is not None:
            shown |= self._text_and_details(delta.choice)
        # Without a space, as TGI writes it: some of its clients cut off five characters.
        return f"data:{compact(shown)}\n\n".encode()

    def whole(self) -> Any:
        """Return the body of a finished completion."""
        parameters = self._parameters
        shown = self._text_and_details(self.completion.choices[0])
        if parameters.details or parameters.decoder_input_details:
            shown["details"] |= {"prefill": self._prefill, "tokens": self._tokens}
            if parameters.top_n_tokens:
                shown["details"]["top_tokens"] = self._top_tokens
        else:
            del shown["details"]
        return [shown] if self._as_list else shown

    def _text_and_details(self, choice: Choice) -> dict[str, Any]:
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
        if choice.score is not None:
            details["score"] = finite(choice.score)
        prompt = choice.prompt.text if self._parameters.return_full_text else ""
        return {"generated_text": prompt + self._text, "details": details}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "text": token_text(self.tokenizer, token_id),
            "logprob": finite(logprob),
            "special": token_id in self.service.special_ids,
        }


@router.get("/info", responses=responses.MODEL_ERRORS)
async def info(service: responses.NamedService) -> Info:
    """Return model and limits, in TGI's form."""
    model, limits = service.describe_model(), service.builder.limits
    n_sequences = service.settings.max_num_seqs + service.settings.queue_limit
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
