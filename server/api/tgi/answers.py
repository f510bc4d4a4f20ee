"""The responses of TGI's routes that are no streams, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.server.api import schemas


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
