"""The body of POST /v1/responses, and the chat request that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import to_json

from kvasir.server.api import schemas
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.formatting import JSON
from kvasir.server.api.openai.responses.items import AnyItem, messages_of
from kvasir.server.api.openai.schemas import CacheSalt, TemplateVariables
from kvasir.server.api.openai.tool_schemas import Function, kind_of_choice
from kvasir.server.api.schemas import Items, RequestBody
from kvasir.server.api.structured import JSONSchema
from kvasir.server.errors import InvalidRequestError

_MOST_METADATA = 2**17  # bytes of JSON
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def _only(*served: object, instead: str) -> BeforeValidator:
    """Return a validator that refuses what is not served, naming it and what to do."""

    def check(value: object) -> object:
        if not any(value == option and type(value) is type(option) for option in served):
            options = " or ".join(map(repr, served))
            raise ValueError(f"{value!r} is not served here, only {options}; {instead}")
        return value

    return BeforeValidator(check)


class PlainFormat(RequestBody):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"] = "text"


class SchemaFormat(JSONSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


def _kind_of_format(value: object) -> str:
    is_schema = isinstance(value, dict) and value.get("type") == "json_schema"
    return "<SchemaFormat>" if is_schema else "<PlainFormat>"


class TextConfig(RequestBody):
    """The form of the text."""

    format: Annotated[
        Annotated[SchemaFormat, Tag("<SchemaFormat>")]
        | Annotated[PlainFormat, Tag("<PlainFormat>")],
        Discriminator(_kind_of_format),
    ] = Field(default_factory=PlainFormat, description="`text`, `json_object` or `json_schema`.")


class ReasoningConfig(RequestBody):
    """Wishes for the reasoning."""

    effort: schemas.Effort | None = Field(None, description="As `reasoning_effort` of a chat.")
    summary: Annotated[
        Literal["auto"] | None,
        _only("auto", instead="reasoning is shown whole: leave it out, or let it be auto"),
    ] = Field(None, description="No effect: reasoning is shown whole.")


class ResponseStreamOptions(RequestBody):
    """Options of a stream."""

    include_obfuscation: Annotated[Literal[False], _only(False, instead="leave it out")] = Field(
        False, description="Events are not padded."
    )


def _check_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "function":
        raise ValueError(
            f"has the type {kind!r}, which is not served here; give a function, and call it"
        )
    return value


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(RequestBody):
    """The name of a function."""

    type: Literal["function"]
    name: str

    def of_chat(self) -> JSON:
        """Return it as chats have it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(RequestBody):
    """Some of the tools. mode: whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedFunction] = Field(min_length=1, max_length=1024)

    def of_chat(self) -> JSON:
        """Return them as chats have them."""
        tools = [tool.of_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


_WORDS = ("none", "auto", "required")


def _check_choice(value: object) -> object:
    is_object = isinstance(value, dict)
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (("function", "allowed_tools") if is_object else _WORDS):
        raise ValueError(
            f"{kind!r} is not served here; it may be {', '.join(_WORDS)}, "
            '{"type": "function", "name": …} or {"type": "allowed_tools", …}'
        )
    return value


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<one>")]
    | Annotated[AllowedFunctions, Tag("<some>")],
    Discriminator(kind_of_choice),
]


def _check_size(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata, which several events repeat, unless there is too much."""
    if (n := len(to_json(metadata))) > _MOST_METADATA:
        raise ValueError(f"has {n} bytes of JSON, more than {_MOST_METADATA}")
    return metadata


class ResponsesBody(schemas.SamplingFields):
    """The body of POST /v1/responses."""

    model: schemas.ModelName = None
    input: Annotated[
        Items[AnyItem],
        BeforeValidator(
            lambda it: [{"role": "user", "content": it}] if isinstance(it, str) else it,
            json_schema_input_type=Items[AnyItem] | str,
        ),
    ] = Field(min_length=1, description="A user's text, or the items of a conversation.")
    instructions: str | None = Field(
        None, description="A system message before it; `previous_response_id` keeps none."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response, whose input and output precede this input."
    )
    store: bool = Field(True, description="Keep the response, within the server's limits.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: ResponseStreamOptions | None = Field(None, description="No effect.")
    max_output_tokens: schemas.NewTokens | None = Field(
        None, description="Maximum number of new tokens. Default, and -1: as many as fit."
    )
    tools: Items[Annotated[FunctionTool, BeforeValidator(_check_tool)]] = Field(
        default_factory=list, description="Functions to call."
    )
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(_check_choice, json_schema_input_type=ToolChoice)
    ] = Field(
        "auto",
        description="Call no function, any, at least one, the one named, or some of "
        "`allowed_tools`.",
    )
    parallel_tool_calls: bool = Field(True, description="False: the first call is the last.")
    max_tool_calls: int | None = Field(
        None, ge=1, description="No effect: it limits tools that are not served."
    )
    text: TextConfig = Field(
        TextConfig(), description="`format`: the form that the text must have."
    )
    reasoning: ReasoningConfig | None = Field(
        None, description="`effort`: a variable for the chat template."
    )
    chat_template_kwargs: TemplateVariables
    include: Items[
        Annotated[
            Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
            _only(LOGPROBS, ENCRYPTED, instead="leave it out"),
        ]
    ] = Field(
        default_factory=list,
        max_length=16,
        description="Log-probabilities of the text; reasoning in a form that all clients send "
        "back.",
    )
    top_logprobs: schemas.TopLogprobs = 0
    truncation: Annotated[
        Literal["disabled"], _only("disabled", instead="send a shorter conversation")
    ] = Field("disabled", description="A conversation that is too long is an error.")
    background: Annotated[
        Literal[False], _only(False, instead="stream the response, or wait for it")
    ] = Field(False, description="Responses in the background are not served.")
    metadata: Annotated[dict[str, Any], AfterValidator(_check_size)] | None = Field(
        None, description="Returned with the response: at most 128 KiB of JSON."
    )
    user: str | None = Field(None, max_length=1024, description="Returned with the response.")
    cache_salt: CacheSalt = ""

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise InvalidRequestError(
                f"top_logprobs may be given only where include has {LOGPROBS!r}",
                param="top_logprobs",
            )
        return self

    @property
    def items(self) -> list[JSON]:
        """The items of the input."""
        return [item.model_dump(exclude_none=True) for item in self.input]

    def chat(self, items: list[JSON]) -> ChatBody:
        """Return the chat request for a conversation. Raises InvalidRequestError."""
        given = self.model_fields_set
        sampling = given & schemas.SamplingFields.model_fields.keys()
        format_ = self.text.format
        if isinstance(format_, SchemaFormat):
            named = format_.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
            response_format = {"type": "json_schema", "json_schema": named}
        else:
            response_format = {"type": format_.type}
        choice = self.tool_choice
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = (tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools)
        return ChatBody.model_validate(
            self.model_dump(include=set(sampling))
            | {
                "model": self.model,
                "messages": [*system, *messages_of(items)],
                "tools": [{"type": "function", "function": tool} for tool in tools],
                "tool_choice": choice if isinstance(choice, str) else choice.of_chat(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": response_format,
                "max_completion_tokens": self.max_output_tokens,
                "reasoning_effort": self.reasoning and self.reasoning.effort,
                "chat_template_kwargs": self.chat_template_kwargs,
                "logprobs": LOGPROBS in self.include,
                "top_logprobs": self.top_logprobs,
                "stream": self.stream,
                "cache_salt": self.cache_salt,
            }
        )

    def echo(self) -> JSON:
        """Return the fields that a response repeats."""
        kept = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "store"}
        kept |= {"previous_response_id", "top_logprobs", "truncation", "background", "user"}
        kept |= {"reasoning", "tool_choice"}
        fields = self.model_dump(include=kept)
        tools = [
            {"parameters": None, "strict": False} | tool.model_dump(exclude_unset=True)
            for tool in self.tools
        ]
        text = {"format": self.text.format.model_dump(by_alias=True)}
        fields["reasoning"] = fields["reasoning"] or {"effort": None, "summary": None}
        return fields | {"tools": tools, "text": text, "metadata": self.metadata or {}}
