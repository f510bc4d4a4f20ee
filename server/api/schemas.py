"""The parts of bodies that protocols share.

Wrong types, values out of range and unknown fields are errors that name the field. A field that is
null counts as not given. Known fields of other servers are accepted if they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    NonNegativeInt,
    NonPositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvasir.model.records import MinP, RepetitionPenalty, Temperature, TopP
from kvasir.server.api.other_servers import IGNORED, NO_OPS, is_no_op, no_op_schema
from kvasir.server.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from kvasir.server.requests.builder import RequestOptions

T = TypeVar("T")

MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_NAMED_TOKENS = 1024  # in stop_token_ids and logit_bias: each costs time in every shared step
# Any client may take the first priority: a head start of a minute.
FIRST_PRIORITY, LAST_PRIORITY = -6, 100
_SAMPLING = (  # the fields that SamplingParams takes as they are
    *("temperature", "top_p", "min_p", "typical_p", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def _check_new_tokens(value: int) -> int:
    if not value:
        raise ValueError("must be at least 1, or -1 for as many as fit")
    return value


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = NonNegativeInt
Logprob = NonPositiveFloat
Share = Annotated[float, Field(ge=0, le=1)]
ApiTopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
NewTokens = Annotated[  # as clients call their maximum, where it may not be 0
    int,
    Field(ge=-1, le=2**31 - 1, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_check_new_tokens),
]
MAX_SAMPLES = 16  # of a prompt
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
Priority = Annotated[int, Field(ge=FIRST_PRIORITY, le=LAST_PRIORITY)]
KeepLast = Annotated[
    int | None, Field(ge=1, description="Keep only this many of the prompt's last tokens.")
]
ModelName = Annotated[
    str | None,
    Field(
        description="A served model's name; another name is a 404. Where several are served, "
        "/v1/… needs one; elsewhere the default is the first."
    ),
]
AddSpecialTokens = Annotated[
    bool, Field(description="Add the special tokens that the tokenizer puts around a text.")
]


Items = Annotated[list[T], Field(fail_fast=True)]  # one error tells enough
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Stops = Annotated[
    _Stops,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=_Stop | _Stops,
    ),
]


def at_most(n: int) -> Callable[[object], object]:
    """Return a check that counts an object's entries first: pydantic would report each bad one."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > n:
            raise ValueError(f"{len(value)} entries are too many: at most {n} may be given")
        return value

    return check


TopLogprobs = Annotated[
    int,
    Field(ge=0, le=MAX_LOGPROBS, description="Number of alternatives to return for each token."),
]
Effort = Annotated[str, Field(min_length=1, max_length=32)]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
_TOKEN_IDS = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
LogitBias = Annotated[
    dict[str, _Bias],
    Field(max_length=MAX_NAMED_TOKENS, json_schema_extra=_TOKEN_IDS),
    BeforeValidator(at_most(MAX_NAMED_TOKENS), json_schema_input_type=dict[str, _Bias]),
]
Counts = Annotated[list[Count], Field(max_length=MAX_NAMED_TOKENS, fail_fast=True)]


class RequestBody(BaseModel):
    """A JSON object in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop what asks for nothing; the context, if there is one, collects names of hints."""
        if not isinstance(values, dict):
            return values
        names = field_names(cls)
        kept = {n: value for n, value in values.items() if n in names and value is not None}
        for name, value in values.items():
            if name in names or value is None:
                continue
            if name in IGNORED:
                if info.context is not None:
                    info.context.add(name)
            elif not is_no_op(name, value):
                kept[name] = value
                break  # one error tells enough
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, with null for each optional field, and with the ignored fields."""
        schema = handler.resolve_ref_schema(handler(core))
        null = {"type": "null"}
        fields = {}
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
                about = {k: field.pop(k) for k in ("title", "description", "default") if k in field}
                field = {"anyOf": [field, null]} | about  # noqa: PLW2901
            if isinstance(field.get("default"), dict):  # which generators of clients do not take
                del field["default"]
            fields[name] = field
        if cls.model_config["extra"] == "ignore":
            schema["properties"] = fields
            return schema
        no_ops = {name: no_op_schema(name) for name in NO_OPS}
        # Clients that send every default must not give a field under two names.
        given = {name: {**fields[own]} for own, name in _other_names(cls)}
        for field in given.values():
            field.pop("default", None)
        schema["properties"] = no_ops | {name: {} for name in sorted(IGNORED)} | given | fields
        schema["additionalProperties"] = null
        return schema


@cache
def field_names(kind: type[RequestBody]) -> frozenset[str]:
    """Return the names that the fields of a body may have."""
    own = (field.alias or name for name, field in kind.model_fields.items())
    return frozenset(own).union(name for _, name in _other_names(kind))


def _other_names(kind: type[RequestBody]) -> Iterator[tuple[str, str]]:
    """Yield the names that fields have in other servers too, each after the field's own."""
    for own, field in kind.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            yield from ((own, str(name)) for name in field.validation_alias.choices[1:])


class ResponseBody(BaseModel):
    """A JSON object in a response."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Page(ResponseBody, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ErrorDetail(ResponseBody):
    """The cause of an error."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None


class Error(ResponseBody):
    """An error of any route but TGI's."""

    error: ErrorDetail


class SamplingFields(RequestBody):
    """The fields that all protocols call by the same names; see SamplingParams."""

    temperature: Temperature = Field(1.0, description="0 takes the likeliest token each time.")
    top_k: ApiTopK = Field(0, description="Sample from so many likeliest tokens; 0, -1: all.")
    top_p: TopP = Field(1.0, description="Sample from the likeliest tokens that sum to this.")
    min_p: MinP = Field(0.0, description="Minimum probability, as a share of the likeliest's.")
    typical_p: TopP = Field(1.0, description="Sample from the most typical that sum to this.")
    repetition_penalty: RepetitionPenalty = Field(
        1.0,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description="Divides the logits of tokens in the prompt or the text; 1 is off. "
        "Also named `repeat_penalty`.",
    )
    frequency_penalty: Penalty = Field(
        0.0, description="Subtracted from a token's logit for each time it is in the text."
    )
    presence_penalty: Penalty = Field(
        0.0, description="Subtracted once from the logits of tokens in the text."
    )
    logit_bias: LogitBias = Field({}, description="Added to logits, by token id.")
    seed: Seed | None = Field(
        None, description="The same seed gives the same text. Default, and -1: random."
    )
    stop: Stops = Field([], description="Strings that end the text, without being part of it.")
    stop_token_ids: Counts = Field([], description="Tokens that end the text.")
    min_tokens: Count = Field(0, description="Minimum number of new tokens.")
    ignore_eos: bool = Field(
        False,
        validation_alias=AliasChoices("ignore_eos", "ignore_eos_token"),
        description="Continue after the model's end-of-text token. Also named `ignore_eos_token`.",
    )
    timeout_ms: Milliseconds | None = Field(
        None, description="Time from arrival to the last token. Default: `default_timeout_ms`."
    )
    priority: Priority = Field(
        0, description="Lower is earlier in the queue; 10 seconds of waiting outweigh one level."
    )

    @field_validator("logit_bias")
    @classmethod
    def _require_token_ids(cls, bias: dict[str, float]) -> dict[str, float]:
        if any(not (key.isascii() and key.isdecimal() and len(key) < 10) for key in bias):
            raise ValueError("its keys must be token ids")
        return bias

    def request_options(
        self,
        prompts: Sequence[str | list[int]],
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        max_tokens: int | None,
        **more: Any,
    ) -> RequestOptions:
        """Return what the builder needs; `more` are fields of RequestOptions.

        max_tokens: -1 is as many as fit, None the default.
        """
        if max_tokens == -1:
            max_tokens, more["default_max_tokens"] = None, 2**31 - 1
        params = SamplingParams(
            **{name: getattr(self, name) for name in _SAMPLING},
            max_tokens=0,  # the builder sets it, and the seed
            top_k=max(0, self.top_k),
            logit_bias={int(key): value for key, value in self.logit_bias.items()},
            stop_token_ids=frozenset(self.stop_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return RequestOptions(
            prompts=prompts,
            params=params,
            max_tokens=max_tokens,
            seed=None if self.seed == -1 else self.seed,
            stops=self.stop,
            timeout_ms=self.timeout_ms,
            priority=self.priority,
            **more,
        )
