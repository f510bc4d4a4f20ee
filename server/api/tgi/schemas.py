"""The bodies of TGI's routes, and the answers that are no streams."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.server.api import schemas
from kvasir.server.api.structured import TGIFormat
from kvasir.server.api.target import TargetFields


class GenerateParameters(schemas.SamplingFields, TargetFields):
    """The `parameters` of a request, which samples only if one of them asks for it."""

    max_new_tokens: schemas.NewTokens | None = Field(
        None,
        description="Maximum number of new tokens; -1: as many as fit. Default: 100, or the room "
        "left; for encoder-decoders the longest target.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=schemas.MAX_SAMPLES,
        description="Sample so many texts, and return the one whose tokens have the highest mean "
        "log-probability. Not on a stream.",
    )
    do_sample: bool = Field(False, description="Sample, even if no other field asks for it.")
    return_full_text: bool = Field(False, description="Begin the text with the prompt.")
    details: bool = Field(
        False, description="Return tokens, log-probabilities and the finish reason."
    )
    decoder_input_details: bool = Field(
        False, description="Return the prompt's tokens too; not available on a stream."
    )
    top_n_tokens: schemas.TopLogprobs = 0
    truncate: schemas.KeepLast = None
    adapter_id: str | None = Field(
        None, description="The adapter to use, instead of naming it in `model`."
    )
    grammar: TGIFormat | None = Field(
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


class _Details(schemas.ResponseBody):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: schemas.Size
    seed: int | None = Field(description="Null for greedy decoding.")
    input_length: schemas.Size
    score: float | None = Field(None, description="Of a beam search: see `length_penalty`.")
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class BestOfSequence(_Details):
    """A text that was less likely than the answer."""

    generated_text: str


class Details(_Details):
    """Details of a whole answer."""

    best_of_sequences: list[BestOfSequence] | None = None


class Generated(schemas.ResponseBody):
    """The response of /generate."""

    generated_text: str
    details: Details | None = None


class Info(schemas.ResponseBody, json_schema_serialization_defaults_required=True):
    """The response of /info."""

    model_id: str
    model_sha: None = None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation", "text2text-generation"] = "text-generation"
    max_concurrent_requests: schemas.Size
    max_best_of: schemas.Size = schemas.MAX_SAMPLES
    max_stop_sequences: schemas.Size = schemas.MAX_STOPS
    max_input_tokens: schemas.Size
    max_total_tokens: schemas.Size
    validation_workers: schemas.Size = 1
    max_client_batch_size: schemas.Size
    router: Literal["kvasir"] = "kvasir"
    version: str
    sha: None = None
    docker_label: None = None
