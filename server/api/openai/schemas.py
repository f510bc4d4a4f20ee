"""The parts of request bodies that OpenAI's routes share, and the body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic import ValidatorFunctionWrapHandler as Validate

from model.bundle import GenerationDefaults
from server.api import schemas
from server.api.target import TargetFields
from server.engine.grammar.constraints import Grammar
from server.engine.sampling import MAX_LOGPROBS
from server.requests.builder import RequestOptions

_AnyPrompts = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1)]
)


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


class JSONSchema(schemas.RequestBody):
    """A schema. The other fields have no effect: every answer follows it."""

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False
    description: str | None = None


class ResponseFormat(schemas.RequestBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Of type json_object, as llama.cpp takes it."
    )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema is given with type json_object, and only then")
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self


AnyFormat = Annotated[
    Annotated[ResponseFormat, Tag("openai")] | Annotated[schemas.TGIFormat, Tag("tgi")],
    Discriminator(
        lambda it: "tgi" if isinstance(it, dict) and it.get("value") is not None else "openai"
    ),
]


class StructuredFields(schemas.RequestBody):
    """The fields that constrain the text."""

    response_format: AnyFormat | None = Field(
        None,
        description="`text`, `json_object` (perhaps with `schema`), `json_schema` with "
        "`json_schema.schema`, "
        "or a `grammar` of /generate.",
    )
    regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    grammar: str | None = Field(
        None, description="A grammar in Lark's notation, whose rule `start` derives the text."
    )

    @model_validator(mode="after")
    def _check_one_grammar(self) -> Self:
        is_free = self.response_format is None or self.response_format.type == "text"
        if [is_free, self.regex is None, self.grammar is None].count(False) > 1:
            raise ValueError(
                "response_format, regex and grammar each constrain the text; give one of them"
            )
        return self

    def any_grammar(self) -> Grammar | None:
        """Return the grammar that was given in any of the fields."""
        if self.regex is not None:
            return Grammar("regex", self.regex, "regex")
        if self.grammar is not None:
            return Grammar("lark", self.grammar, "grammar")
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if not isinstance(form, ResponseFormat):
            return schemas.tgi_grammar(form, "response_format")
        if form.json_schema is not None:
            return Grammar.json_schema(form.json_schema.schema_)
        return Grammar.json_schema({"type": "object"} if form.schema_ is None else form.schema_)


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
    n: int = Field(1, ge=1, le=16, description="Number of answers to each prompt.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`: send the usage in a last event."
    )
    truncate_prompt_tokens: schemas.KeepLast = None
    cache_salt: str = Field(
        "",
        max_length=1024,
        description="Only requests with the same salt share the prefix cache. Default: none.",
    )

    @model_validator(mode="after")
    def _check_fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only where stream is true")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError(
                "max_tokens and max_completion_tokens are one setting; give one of them"
            )
        return self

    def options(
        self, prompts: Sequence[str | list[int]], defaults: GenerationDefaults, **more: Any
    ) -> RequestOptions:
        """Return what the builder needs; `defaults` are the model's, for fields not given."""
        update = defaults.model_dump(exclude_none=True, exclude=self.model_fields_set)
        more["max_tokens"] = self.max_tokens
        if self.max_tokens is None:
            more["max_tokens"] = self.max_completion_tokens
        if more["max_tokens"] == -1:
            more |= {"max_tokens": None, "default_max_tokens": 2**31 - 1}
        return self.model_copy(update=update).request_options(
            prompts,
            n=self.n,
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
    add_special_tokens: schemas.AddSpecialTokens = True
