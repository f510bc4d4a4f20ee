"""The parts of bodies that protocols share, and how a request's body is parsed.

Wrong types, values out of range and unknown fields are errors that name the field. A field that is
null counts as not given. Known fields of other servers are accepted if they ask for nothing:
IGNORED whatever their value, NO_OPS with these values.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
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
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, from_json
from starlette.responses import Response

from model.bundle import MinP, RepetitionPenalty, Temperature, TopP
from server.api.http.responses import models_of, state_of, unless_disconnected
from server.engine.grammar.constraints import Grammar
from server.engine.sampling import SamplingParams
from server.errors import InvalidRequestError
from server.requests.builder import RequestOptions
from server.requests.service import Task
from server.requests.text_worker import SHORT

T = TypeVar("T")

_VERSIONS = ("/v1/", "/v2/")  # the paths of protocols whose bodies name a model

# A prompt has at most so many token ids, and a conversation so many messages and schemas. At any of
# these limits no step of the work on a body holds the interpreter's lock for 50 ms.
MOST_IN_BODY = (
    ("quotation marks around strings", (b'"',), 2**16),
    ("commas between values", (b",",), 2**18),
    ("objects and arrays", (b"{", b"["), 2**14),
    ("fractions, exponents and booleans", (b".", b"e", b"E"), 2**15),
)
_MOST_DIGITS = 400  # of a number: reading a whole one takes time by their square
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(i) in "0123456789" else 32 for i in range(256))
_LONG_NUMBER = b"0" * (_MOST_DIGITS + 1)
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_NAMED_TOKENS = 1024  # in stop_token_ids and logit_bias: each costs time in every shared step
# Any client may take the first priority: a head start of a minute.
FIRST_PRIORITY, LAST_PRIORITY = -6, 100
_SAMPLING = (  # the fields that SamplingParams takes as they are
    *("temperature", "top_p", "min_p", "typical_p", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_GREEDY_BELOW = 1e-5  # a smaller temperature would overflow float32
IGNORED = frozenset({"user", "store", "metadata", "prompt_cache_key", "safety_identifier"})
NO_OPS: dict[str, list[Any]] = {
    name: values
    for names, values in (
        ("best_of", [1]),
        ("suffix", [""]),
        ("response_format", [{"type": "text"}]),
        ("top_logprobs", [0]),
        ("service_tier", ["auto", "default"]),
        ("modalities", [["text"]]),
        ("verbosity", ["medium"]),
        ("length_penalty", [1.0]),
        ("tool_choice function_call reasoning_effort", ["none"]),
        ("tools functions bad_words", [[]]),
        ("parallel_tool_calls include_reasoning detokenize cache_prompt", [True]),
        ("skip_special_tokens spaces_between_special_tokens use_activation", [True]),
        ("echo stream prompt_logprobs include_obfuscation watermark", [False]),
        ("use_beam_search early_stopping include_stop_str_in_output", [False]),
        ("return_token_ids return_tokens_as_token_ids", [False]),
    )
    for name in names.split()
}

# What does here what other servers' fields do.
_SCHEMA = '"response_format": {"type": "json_schema", "json_schema": {"schema": …}}'
_USED_HERE = {
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "guided_regex": "regex",
    "guided_choice": "regex, as in a|b",
    "guided_grammar": "grammar",
    "ebnf": "grammar, in Lark's notation",
    "structured_outputs": f"regex, grammar, or {_SCHEMA}",
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "ignore_eos_token": "ignore_eos",
    "typical": "typical_p",
    "best_of": "n",
    "use_beam_search": "num_beams",
    "forced_bos_token_id": "target_language",
}

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = NonNegativeInt
Logprob = NonPositiveFloat
Share = Annotated[float, Field(ge=0, le=1)]
ApiTopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_RoundedTemperature = Annotated[
    Temperature, AfterValidator(lambda value: 0.0 if value < _GREEDY_BELOW else value)
]
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


def _check_bias(value: object) -> object:
    """Count the entries first: pydantic would report each bad one."""
    if isinstance(value, dict) and len(value) > MAX_NAMED_TOKENS:
        most = f"at most {MAX_NAMED_TOKENS} may be given"
        raise ValueError(f"{len(value)} entries are too many: {most}")
    return value


_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
_TOKEN_IDS = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
LogitBias = Annotated[
    dict[str, _Bias],
    Field(max_length=MAX_NAMED_TOKENS, json_schema_extra=_TOKEN_IDS),
    BeforeValidator(_check_bias, json_schema_input_type=dict[str, _Bias]),
]
Counts = Annotated[list[Count], Field(max_length=MAX_NAMED_TOKENS, fail_fast=True)]


class RequestBody(BaseModel):
    """A JSON object in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        names = _names(cls)
        kept = {n: value for n, value in values.items() if n in names and value is not None}
        for name, value in values.items():
            if not (name in names or value is None or name in IGNORED or _is_no_op(name, value)):
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
            fields[name] = field
        if cls.model_config["extra"] == "ignore":
            schema["properties"] = fields
            return schema
        no_ops = {name: {"enum": [*values, None]} for name, values in NO_OPS.items()}
        given = {name: fields[own] for own, name in _other_names(cls)}
        schema["properties"] = no_ops | dict.fromkeys(sorted(IGNORED), True) | given | fields
        schema["additionalProperties"] = null
        return schema


@cache
def _names(kind: type[RequestBody]) -> frozenset[str]:
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


class ErrorDetail(ResponseBody):
    """The cause of an error."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None


class Error(ResponseBody):
    """An error of any route but TGI's."""

    error: ErrorDetail


def _is_no_op(name: str, value: object) -> bool:
    return any(
        value == no_op and isinstance(value, bool) is isinstance(no_op, bool)
        for no_op in NO_OPS.get(name, ())
    )


class SamplingFields(RequestBody):
    """The fields that all protocols call by the same names; see SamplingParams."""

    temperature: _RoundedTemperature = Field(
        1.0, description="0 takes the likeliest token each time."
    )
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
        **more: Any,
    ) -> RequestOptions:
        """Return what the builder needs; `more` are fields of RequestOptions."""
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
            seed=None if self.seed == -1 else self.seed,
            stops=self.stop,
            timeout_ms=self.timeout_ms,
            priority=self.priority,
            **more,
        )


def _schema_of(text: str) -> Any:
    check_amount(text.encode())
    return from_json(text, allow_inf_nan=False)


class TGIJSON(RequestBody):
    """A JSON schema, or its text in a string, as TGI's clients send it."""

    type: Literal["json", "json_object"]
    value: Annotated[
        dict[str, Any],
        BeforeValidator(
            lambda it: _schema_of(it) if isinstance(it, str) else it,
            json_schema_input_type=dict[str, Any] | str,
        ),
    ]


class TGINamedSchema(RequestBody):
    """A JSON schema that may have a name."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class TGIJSONSchema(RequestBody):
    """A named JSON schema, as TGI's clients send it."""

    type: Literal["json_schema"]
    value: TGINamedSchema


class TGIRegex(RequestBody):
    """A regular expression, as TGI's clients send it."""

    type: Literal["regex"]
    value: str


TGIFormat = Annotated[TGIJSON | TGIJSONSchema | TGIRegex, Field(discriminator="type")]


def tgi_grammar(form: TGIFormat, param: str) -> Grammar:
    """Return the grammar of a format; `param` names it in errors."""
    if isinstance(form, TGIRegex):
        return Grammar("regex", form.value, param)
    schema = form.value if isinstance(form, TGIJSON) else form.value.schema_
    return Grammar.json_schema(schema, param)


class BodyRoute(APIRoute):
    """A route whose body FastAPI documents, and `parse` parses for one-line errors.

    A path of a version, such as /v1, wants a model's name where several are served. Elsewhere the
    default is the first for the route's task.
    """

    tasks: tuple[Task, ...] = ()  # none: a route of every model

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler. An endpoint with a body takes the request and the body."""
        kind = get_type_hints(self.endpoint, include_extras=True).get("body")
        if kind is None:
            return super().get_route_handler()
        adapter: TypeAdapter[Any] = TypeAdapter(kind)

        async def answer(request: Request, raw: bytes) -> Response:
            models = models_of(request.scope)
            body = await models.text_worker.call(len(raw), partial(parse, adapter, raw))
            name = getattr(body, "model", None)
            service = models.find(name, *self.tasks, must_choose=self.path.startswith(_VERSIONS))
            state_of(request.scope).model = service.name
            response: Response = await self.endpoint(request, body)
            return response

        async def handle(request: Request) -> Response:
            # `request.body()` would keep the bytes until the answer has ended.
            raw = b"".join([piece async for piece in request.stream()])
            state_of(request.scope).body_size = len(raw)
            work = answer(request, raw)
            return await (work if len(raw) <= SHORT else unless_disconnected(request.receive, work))

        return handle


class TextRoute(BodyRoute):
    """A route of the models that continue texts."""

    tasks = ("generate",)


class VectorRoute(BodyRoute):
    """A route of the models that make vectors of texts."""

    tasks = ("embed",)


class LabelRoute(BodyRoute):
    """A route of the models that score labels."""

    tasks = ("classify",)


class EncoderRoute(BodyRoute):
    """A route of the models that make vectors of texts, and of those that score labels."""

    tasks = ("embed", "classify")


def check_amount(raw: bytes) -> None:
    """Raise InvalidRequestError for a JSON text that would take too long to parse."""
    if not (_excess(raw, *MOST_IN_BODY) or _has_long_number(raw)):
        return
    # Count again outside strings. Without escapes, every quotation mark begins or ends a string.
    marks = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    excess = _excess(marks, MOST_IN_BODY[0])
    if not excess:
        outside = b"".join(marks.split(b'"')[::2])
        excess = _excess(outside, *MOST_IN_BODY[1:])
        if _has_long_number(outside):
            excess = f"a number of more than {_MOST_DIGITS} digits"
    if excess:
        raise InvalidRequestError(f"the body has {excess}; send less at once")


def _has_long_number(text: bytes) -> bool:
    return _LONG_NUMBER in text.translate(_DIGITS_AS_ZEROS)


def _excess(text: bytes, *limits: tuple[str, tuple[bytes, ...], int]) -> str | None:
    """Return in words the first of the limits that a text exceeds."""
    counts = ((sum(map(text.count, marks)), name, most) for name, marks, most in limits)
    return next((f"{n} {name}, more than {most}" for n, name, most in counts if n > most), None)


def parse(adapter: TypeAdapter[T], raw: bytes) -> T:
    """Return a body from its JSON. Raises InvalidRequestError naming the first wrong field."""
    try:
        check_amount(raw)
        value = from_json(raw)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "too_long":  # pydantic counts the entries of a list only
        n_entries, limit = len(first["input"]), first["ctx"]["max_length"]
        message = f"{n_entries} entries are too many: at most {limit} may be given"
    is_missing = first["type"] == "missing"
    place = ".".join(map(str, _path(first["loc"], value, is_missing=is_missing)))
    if first["type"] == "extra_forbidden":
        mend = f"use {_USED_HERE[place]}" if place in _USED_HERE else "leave it out"
        message = f"the field {place!r} is unknown or not supported; {mend}"
    elif place:
        message = f"{place}: {message}"
    raise InvalidRequestError(message, param=place or None)


def _path(parts: tuple[int | str, ...], value: Any, *, is_missing: bool) -> Iterator[int | str]:
    """Yield an error's location without the names that unions and validators add."""
    for depth, part in enumerate(parts, 1):
        if isinstance(value, dict):
            is_in_body = part in value
        else:
            is_in_body = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_in_body:
            value = value[part]
        if is_in_body or (is_missing and depth == len(parts)):
            yield part
