"""The parts of request bodies that OpenAI's routes share, and the body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic import ValidatorFunctionWrapHandler as Validate

from kvasir.model.records import GenerationDefaults
from kvasir.server.api import schemas
from kvasir.server.api.other_servers import NO_OPS
from kvasir.server.api.structured import StructuredFields
from kvasir.server.api.target import TargetFields
from kvasir.server.engine.sampling.params import MAX_LOGPROBS
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.builder import RequestOptions

_AnyPrompts = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1)]
)


CacheSalt = Annotated[
    str,
    Field(
        max_length=1024,
        description="Only requests with the same salt share the prefix cache. Default: none.",
    ),
]
TemplateVariables = Annotated[
    dict[str, Any],
    Field(
        default_factory=dict, description="Variables for the template, such as `enable_thinking`."
    ),
]
MaxTokens = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class StreamOptions(schemas.RequestBody):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the usage in a last event.")
    continuous_usage_stats: bool = Field(
        False,
        description="With `include_usage`: send the usage so far in every event, as vLLM does.",
    )

    @model_validator(mode="after")
    def _check_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats may be given only where include_usage is true")
        return self


class Part(schemas.RequestBody):
    """A part of a conversation. Keys that clients add to what they send back are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextPart(Part):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def check_content(value: object, *kinds: str) -> object:
    """Return content, unless it is neither a text nor a list of parts of these types, or text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        names = " or ".join(kinds or ("text",))
        raise ValueError(f"must be a string, or a list of parts of type {names}")
    given = [part.get("type") if isinstance(part, dict) else None for part in value]
    if other := next((kind for kind in given if kind not in ("text", *kinds)), None):
        raise ValueError(
            f"has a part of type {other!r}, but the model reads text only; leave it out"
        )
    return value


class OpenAIBody(schemas.SamplingFields, StructuredFields):
    """The fields that OpenAI's routes share."""

    model: schemas.ModelName = None
    max_tokens: MaxTokens | None = Field(
        None,
        validation_alias=AliasChoices("max_tokens", "n_predict"),
        description="Maximum number of new tokens; -1: as many as fit. Also named `n_predict`.",
    )
    max_completion_tokens: MaxTokens | None = Field(
        None, description="Another name for `max_tokens`."
    )
    n: int = Field(1, ge=1, le=schemas.MAX_SAMPLES, description="Number of answers to each prompt.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=schemas.MAX_SAMPLES,
        description="Generate so many, and return the `n` whose tokens have the highest mean "
        "log-probability. Not on a stream.",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability and rank of each token of the prompt, and of so "
        "many likeliest, as vLLM does. Not on a stream.",
    )
    skip_special_tokens: bool = Field(
        True, description="False: special tokens but the last show in the text."
    )
    return_token_ids: bool = Field(
        False,
        description="Return the ids of the prompt's tokens and the new ones with each choice, and "
        "those of `logprobs`.",
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`: send the usage in a last event."
    )
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Keep only this many of the prompt's last tokens; -1: as many as the model "
        "takes beside `max_tokens`.",
    )
    cache_salt: CacheSalt = ""

    @model_validator(mode="after")
    def _check_fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only where stream is true")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError(
                "max_tokens and max_completion_tokens are one setting; give one of them"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must be at least n ({self.n})", param="best_of"
            )
        for name in ("best_of", "prompt_logprobs"):
            if self.stream and getattr(self, name) not in (None, NO_OPS.get(name, [None])[0]):
                raise InvalidRequestError(
                    f"{name} is not available on a stream; let stream be false", param=name
                )
        return self

    @property
    def n_samples(self) -> int:
        """The number of samples of each prompt, of which `n` are returned."""
        return max(self.n, self.best_of or 1)

    def options(
        self, prompts: Sequence[str | list[int]], defaults: GenerationDefaults, **more: Any
    ) -> RequestOptions:
        """Return what the builder needs; `defaults` are the model's, for fields not given."""
        update = defaults.model_dump(exclude_none=True, exclude=self.model_fields_set)
        more["max_tokens"] = self.max_tokens
        if self.max_tokens is None:
            more["max_tokens"] = self.max_completion_tokens
        if self.n_samples > self.n and more["logprobs"] is None:
            more["logprobs"] = 0  # to rank the samples
        return self.model_copy(update=update).request_options(
            prompts,
            n=self.n_samples,
            keep_last=self.truncate_prompt_tokens,
            cache_salt=self.cache_salt,
            **more,
        )


def _as_prompts(value: object, validate: Validate) -> object:
    """Return a list of texts, or of lists of token ids, for any of OpenAI's four forms."""
    is_ids = isinstance(value, list) and all(type(item) is int for item in value[:1])
    try:
        return validate([value] if is_ids or isinstance(value, str) else value)
    except ValidationError:
        forms = "a string, a list of strings, token ids, or a list of token-id lists"
        raise ValueError(f"must be {forms}") from None


# Texts or lists of token ids, in OpenAI's four forms.
Prompts = Annotated[
    schemas.Items[str] | schemas.Items[schemas.Items[int]],
    WrapValidator(_as_prompts, json_schema_input_type=_AnyPrompts),
]


class CompletionsBody(OpenAIBody, TargetFields):
    """The body of POST /v1/completions."""

    prompt: Prompts = Field(description="Text, token ids, or a list of either.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return each token's log-probability, and those of so many likeliest.",
    )
    echo: bool = Field(
        False, description="Begin the text and its log-probabilities with the prompt."
    )
    suffix: str = Field(
        "",
        description="The text that follows: the answer is between the two, of models whose "
        "tokenizer has tokens for that.",
    )
    add_special_tokens: schemas.AddSpecialTokens = True

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        if not self.suffix:
            return self
        if not isinstance(self.prompt[0], str):
            raise InvalidRequestError(
                "suffix is given with a prompt of text; token ids may hold the tags themselves",
                param="suffix",
            )
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"suffix and {name} exclude each other; leave one of them out", param="suffix"
                )
        return self

    @property
    def scored_prompt(self) -> int | None:
        """The number of alternatives to each token of the prompt; None if none are scored."""
        echoed = self.logprobs if self.echo else None
        wanted = [n for n in (echoed, self.prompt_logprobs) if n is not None]
        return max(wanted, default=None)
