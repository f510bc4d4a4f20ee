"""Request bodies. Wrong types, values out of range and unknown fields are errors that name the field.

A field that is null counts as not given, and one that holds its no-op default (`best_of: 1`) is accepted wherever it
turns up; WITHOUT_EFFECT names what is accepted without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json

from server.engine.grammar.constraints import Grammar
from server.engine.sampling import MAX_LOGPROBS, SamplingParams
from server.errors import InvalidRequestError

MAX_N = 16
MAX_STOPS = 16
SOONEST_PRIORITY, LATEST_PRIORITY = (
    -6,
    100,
)  # any client may take the first: a head start of a minute
MAX_TOKENS_NAMED = 1024  # in stop_token_ids and logit_bias: each costs time in everybody's step
_GREEDY_BELOW = 1e-5  # a smaller temperature would overflow float32
WITHOUT_EFFECT = frozenset({"user", "store", "metadata", "prompt_cache_key", "safety_identifier"})
NO_OPS: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "stream": [False],
    "suffix": [""],
    "response_format": [{"type": "text"}],
    "tools": [[]],
    "tool_choice": ["none"],
    "parallel_tool_calls": [True],
    "functions": [[]],
    "function_call": ["none"],
    "top_logprobs": [0],
    "prompt_logprobs": [False],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    "verbosity": ["medium"],
    "reasoning_effort": ["none"],
    "include_reasoning": [True],
    "include_obfuscation": [False],
    "annotations": [[]],
    "watermark": [False],
    "use_beam_search": [False],
    "length_penalty": [1.0],
    "early_stopping": [False],
    "bad_words": [[]],
    "detokenize": [True],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "include_stop_str_in_output": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
}

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1)]
Several = Field(min_length=1)
Prompts = (
    str
    | Annotated[list[str], Several]
    | Annotated[list[int], Several]
    | Annotated[list[list[int]], Several]
)


def _few(value: object) -> object:
    if isinstance(value, list | dict) and len(value) > MAX_TOKENS_NAMED:
        raise ValueError(
            f"{len(value)} entries are too many: at most {MAX_TOKENS_NAMED} may be given"
        )
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: object) -> object:
    """A list of texts, or of lists of token ids, from any of the four forms that OpenAI takes."""
    items: list[object] = value if isinstance(value, list) else [value]
    if isinstance(value, list) and all(type(item) is int for item in items):
        items = [items]
    texts = all(isinstance(item, str) for item in items)
    if items and (
        texts or all(isinstance(item, list) and all(type(i) is int for i in item) for item in items)
    ):
        return items
    raise ValueError("must be a string, a list of strings, token ids, or a list of token-id lists")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        unknown = values.keys() - cls.model_fields.keys()
        idle = {name for name in unknown if name in WITHOUT_EFFECT or _is_no_op(name, values[name])}
        return {
            name: value for name, value in values.items() if value is not None and name not in idle
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The same as a schema: what may be left out may be null, and so may any other name."""
        schema = handler.resolve_ref_schema(handler(core))
        null = {"type": "null"}
        fields = {
            name: known
            if name in schema.get("required", ()) or null in known.get("anyOf", ())
            else _either(known, null)
            for name, known in schema["properties"].items()
        }
        idle = {name: {"enum": [*no_ops, None]} for name, no_ops in NO_OPS.items()}
        schema["properties"] = idle | dict.fromkeys(sorted(WITHOUT_EFFECT), True) | fields
        schema["additionalProperties"] = null
        return schema


def _either(schema: JsonSchemaValue, other: JsonSchemaValue) -> JsonSchemaValue:
    """One schema or the other, with what the first says about its field."""
    about = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return {
        "anyOf": [{key: value for key, value in schema.items() if key not in about}, other]
    } | about


def _is_no_op(name: str, value: object) -> bool:
    return any(
        value == no_op and isinstance(value, bool) is isinstance(no_op, bool)
        for no_op in NO_OPS.get(name, ())
    )


class SamplingFields(Body):
    """What every protocol calls by the same name. See SamplingParams for what each does."""

    temperature: float = Field(
        1.0, ge=0.0, le=100.0, description="0 takes the likeliest token each time."
    )
    top_k: int = Field(
        0,
        ge=-1,
        le=2**31 - 1,
        description="Only that many of the likeliest tokens; 0 and -1 are all.",
    )
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Only the likeliest tokens that have this share together."
    )
    min_p: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Only tokens with this share of the likeliest's probability.",
    )
    typical_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Only the most typical tokens that have this share."
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100.0,
        description="Divides the logits of tokens in the prompt or the text; 1 is off.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Taken from a token's logit for each time that the text has it.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken once from those that the text has."
    )
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], BeforeValidator(_few)
    ] = Field(
        {},
        description="By token id, what is added to its logit.",
        json_schema_extra={
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "maxProperties": MAX_TOKENS_NAMED,
        },
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**64,
        description="The same seed gives the same text. Default: another one each time.",
    )
    stop: Annotated[
        list[Stop],
        Field(max_length=MAX_STOPS),
        BeforeValidator(
            _as_list,
            json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)],
        ),
    ] = Field([], description="Strings that end the text; they are not part of it.")
    stop_token_ids: Annotated[list[Count], BeforeValidator(_few)] = Field(
        [],
        description="Tokens that end the text.",
        json_schema_extra={"maxItems": MAX_TOKENS_NAMED},
    )
    min_tokens: Count = Field(0, description="Tokens before which nothing ends the text.")
    ignore_eos: bool = Field(False, description="Go on after the model's own end of the text.")
    timeout_ms: int | None = Field(
        None,
        ge=1,
        le=86_400_000,
        description="Time from arrival to the last token. Default: `default_timeout_ms`.",
    )
    priority: int = Field(
        0,
        ge=SOONEST_PRIORITY,
        le=LATEST_PRIORITY,
        description="Lower is sooner, as long as it waits; 10 seconds of waiting make up for a level.",
    )

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias: dict[str, float]) -> dict[str, float]:
        if any(not (key.isascii() and key.isdecimal() and len(key) < 10) for key in bias):
            raise ValueError("its keys must be token ids")
        return bias

    def sampling_params(self, defaults: Mapping[str, float], **fields: Any) -> SamplingParams:
        """With the model's defaults for what was not given, and the fields that each protocol names in its own way."""
        common: dict[str, Any] = {
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_k": max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": {int(key): value for key, value in self.logit_bias.items()},
            "stop_token_ids": frozenset(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        common |= {
            name: value for name, value in defaults.items() if name not in self.model_fields_set
        }
        params = SamplingParams(**(common | fields))
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) must be at most the {params.max_tokens} tokens to generate",
                param="min_tokens",
            )
        return params

    @field_validator("temperature")
    @classmethod
    def _nearly_greedy_is_greedy(cls, temperature: float) -> float:
        return 0.0 if temperature < _GREEDY_BELOW else temperature


class StreamOptions(Body):
    include_usage: bool = Field(False, description="A last event with the usage.")
    continuous_usage_stats: bool = Field(
        False, description="With it, the usage so far in every event, as vLLM has it."
    )

    @model_validator(mode="after")
    def _usage_is_wanted_at_all(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats may be given only where include_usage is true")
        return self


class JSONSchema(Body):
    """`strict` and `description` change nothing: every answer is held to the schema, and to it alone."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False
    description: str | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self

    def wanted(self, param: str) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_, param)
        return None if self.type == "text" else Grammar.json_object(param)


def _from_text(value: object) -> object:
    return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value


class TGIJSON(Body):
    """`value`: a schema, or its JSON in a string."""

    type: Literal["json", "json_object"]
    value: Annotated[
        dict[str, Any], BeforeValidator(_from_text, json_schema_input_type=dict[str, Any] | str)
    ]

    def wanted(self, param: str) -> Grammar:
        return Grammar.json_schema(self.value, param)


class TGINamedSchema(Body):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class TGIJSONSchema(Body):
    type: Literal["json_schema"]
    value: TGINamedSchema

    def wanted(self, param: str) -> Grammar:
        return Grammar.json_schema(self.value.schema_, param)


class TGIRegex(Body):
    type: Literal["regex"]
    value: str

    def wanted(self, param: str) -> Grammar:
        return Grammar.regex(self.value, param)


TGIFormat = Annotated[TGIJSON | TGIJSONSchema | TGIRegex, Field(discriminator="type")]


def _whose_words(value: object) -> Literal["openai", "tgi"]:
    return "tgi" if isinstance(value, dict) and value.get("value") is not None else "openai"


AnyFormat = Annotated[
    Annotated[ResponseFormat, Tag("openai")] | Annotated[TGIFormat, Tag("tgi")],
    Discriminator(_whose_words),
]


class StructuredFields(Body):
    """What OpenAI's routes take to say what the text has to be: `grammar` is Lark's notation."""

    response_format: AnyFormat | None = Field(
        None,
        description="`text`; `json_object`; `json_schema`, with `json_schema.schema`; or as /generate's `grammar`.",
    )
    regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    grammar: str | None = Field(
        None, description="A grammar in Lark's notation, whose rule `start` derives the text."
    )

    @model_validator(mode="after")
    def _one_grammar_at_most(self) -> Self:
        is_free = self.response_format is None or self.response_format.type == "text"
        if [is_free, self.regex is None, self.grammar is None].count(False) > 1:
            raise ValueError(
                "response_format, regex and grammar each say what the text has to be; give one of them"
            )
        return self

    def grammar_wanted(self) -> Grammar | None:
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar is not None:
            return Grammar.lark(self.grammar)
        return (
            None if self.response_format is None else self.response_format.wanted("response_format")
        )


class OpenAIBody(SamplingFields, StructuredFields):
    """What OpenAI's routes call by the same name."""

    model: str | None = Field(None, description="The served model's name; another is 404.")
    max_tokens: Count | None = Field(None, description="Most tokens to generate.")
    max_completion_tokens: Count | None = Field(None, description="Another name for `max_tokens`.")
    n: int = Field(1, ge=1, le=MAX_N, description="Answers to each prompt.")
    stream: bool = Field(False, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`: a last event with the usage."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, description="Keep that many of the prompt's last tokens."
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only where stream is true")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError(
                "max_tokens and max_completion_tokens are one setting; give one of them"
            )
        return self

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionsBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]], BeforeValidator(_as_prompts, json_schema_input_type=Prompts)
    ] = Field(description="Text, token ids, or a list of either.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probability of each token, and of that many likelier ones.",
    )
    echo: bool = Field(
        False, description="Begin the text, and its log-probabilities, with the prompt."
    )
    add_special_tokens: bool = Field(
        True, description="Those that the tokenizer puts around a text."
    )


class GenerateParameters(SamplingFields):
    """`parameters` of TGI's routes. It samples where `do_sample`, or any field that only matters then, says so."""

    max_new_tokens: Count | None = Field(
        None, ge=1, description="Most tokens to generate. Default: 100, or the room."
    )
    do_sample: bool = Field(False, description="Sample, also where no other field asks for it.")
    return_full_text: bool = Field(False, description="Begin the text with the prompt.")
    details: bool = Field(False, description="Tokens, their log-probabilities, and how it ended.")
    decoder_input_details: bool = Field(False, description="The prompt's too; not on a stream.")
    top_n_tokens: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description="That many alternatives to each token."
    )
    truncate: int | None = Field(
        None, ge=1, description="Keep that many of the prompt's last tokens."
    )
    grammar: TGIFormat | None = Field(
        None,
        description="`json` or `json_object` with a schema as `value`, `regex`, or `json_schema` with `value.schema`.",
    )

    @property
    def samples(self) -> bool:
        shapes = (
            self.top_k > 0,
            self.top_p < 1.0,
            self.typical_p < 1.0,
            self.min_p > 0.0,
            self.temperature != 1.0,
        )
        return (self.do_sample or any(shapes)) and self.temperature > 0.0

    def grammar_wanted(self) -> Grammar | None:
        return None if self.grammar is None else self.grammar.wanted("parameters.grammar")


class GenerateBody(Body):
    """POST /generate and /generate_stream."""

    inputs: str = Field(description="The text to continue.")
    parameters: GenerateParameters = Field(
        default_factory=lambda: GenerateParameters.model_validate({}), description="See below."
    )


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes) -> B:
    """A body from its JSON. Raises InvalidRequestError naming the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], raw) from None


def _explain(first: ErrorDetails, raw: bytes) -> InvalidRequestError:
    kind: str | Literal["extra_forbidden"] = first["type"]
    if kind == "json_invalid":
        return InvalidRequestError(
            f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        )
    place = ".".join(map(str, _place(first["loc"], from_json(raw), is_missing=kind == "missing")))
    if kind == "extra_forbidden":
        return InvalidRequestError(
            f"the field {place!r} is unknown or not supported; leave it out", param=place
        )
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"{place}: {message}" if place else message, param=place or None)


def _place(parts: tuple[int | str, ...], value: Any, *, is_missing: bool) -> Iterator[int | str]:
    """Those parts that lead through the body: alternatives of a union, and validators, add names of their own."""
    for depth, part in enumerate(parts, 1):
        if isinstance(value, dict):
            leads_on = part in value
        else:
            leads_on = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if leads_on:
            value = value[part]
        if leads_on or (is_missing and depth == len(parts)):
            yield part
