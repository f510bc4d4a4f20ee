"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from server.api.openai.schemas import OpenAIBody
from server.api.schemas import RequestBody
from server.engine.sampling import MAX_LOGPROBS
from server.errors import InvalidRequestError

# What the template is given in other ways.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
# What the openai package adds to an answer, and sends back with it: the same again as values, or where it was.
AnswerOnly = Annotated[Any, Field(exclude=True)]


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


def _as_content(value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, or a list of parts of type text")
    kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
    if other := next((kind for kind in kinds if kind != "text"), None):
        raise ValueError(
            f"has a part of type {other!r}, but the model reads text only; leave it out"
        )
    return value


class PastFunction(RequestBody):
    name: str
    arguments: str
    parsed_arguments: AnswerOnly = None


def _as_values(arguments: str) -> dict[str, Any] | str:
    """The mapping that templates expect in place of JSON; what a model wrote that is no object stays as it is."""
    if not arguments.strip():
        return {}
    try:
        values: Any = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return values if isinstance(values, dict) else arguments


class PastCall(RequestBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: PastFunction
    index: AnswerOnly = None


class Message(RequestBody):
    """`reasoning_content`, by any of its names: what the assistant thought, for templates that show it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart] | str | None, BeforeValidator(_as_content)] = None
    name: str | None = None
    tool_calls: list[PastCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    parsed: AnswerOnly = None

    @model_validator(mode="after")
    def _fields_go_with_the_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only a message with tool_calls may go without")
        if self.role != "assistant":
            own = ("tool_calls", "reasoning_content", "reasoning", "thinking")
            if foreign := next((name for name in own if getattr(self, name)), None):
                raise ValueError(f"{foreign} belongs to the role assistant, not {self.role}")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id belongs to the role tool, not {self.role}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message in plain values, with the arguments of calls as mappings where they are objects."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
            for call in message["tool_calls"]:
                call["function"]["arguments"] = _as_values(call["function"]["arguments"])
        return message


class Function(RequestBody):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of its arguments. Default: it has none."
    )
    strict: bool = Field(
        False,
        description="Hold the arguments to the schema also where the model calls as it likes.",
    )

    @field_validator("parameters")
    @classmethod
    def _parameters_are_an_object(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters.get("type", "object") != "object":
            raise ValueError(f"must be a schema of type object, not {parameters['type']!r}")
        return parameters

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Without parameters, that of no arguments."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(RequestBody):
    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_given(cls, values: Any, check: ValidatorFunctionWrapHandler) -> Self:
        tool: Self = check(values)
        tool._given = values
        return tool

    @property
    def given(self) -> dict[str, Any]:
        """As the client wrote it, its keys in order: for templates, which show it to the model."""
        return self._given


class FunctionName(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"] = "function"
    function: FunctionName


def _as_tool_choice(value: object) -> object:
    if isinstance(value, dict) or value in ("none", "auto", "required"):
        return value
    raise ValueError(
        'must be none, auto, required, or {"type": "function", "function": {"name": …}}'
    )


class Conversation(RequestBody):
    """What the model's chat template makes a text of."""

    messages: list[Message] = Field(
        min_length=1, description="The conversation, for the model's chat template."
    )
    tools: list[Tool] = Field(
        default_factory=list,
        description="Functions that the model may call, for the template, as they are written.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the template, such as `enable_thinking`."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt where the assistant is to speak. Default: unless a message is continued.",
    )
    continue_final_message: bool = Field(
        False, description="End the prompt where the last message ends."
    )
    add_special_tokens: bool = Field(
        False,
        description="Those that the tokenizer puts around a text, around what the template writes.",
    )

    @model_validator(mode="after")
    def _template_options_agree(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other; give one of them",
                param="continue_final_message",
            )
        if reserved := _RESERVED & self.chat_template_kwargs.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {min(reserved)!r}; the body has a field for it",
                param="chat_template_kwargs",
            )
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        return self.tools


class ChatBody(OpenAIBody, Conversation):
    """POST /v1/chat/completions."""

    tool_choice: Annotated[
        NamedTool | Literal["none", "auto", "required"], BeforeValidator(_as_tool_choice)
    ] = Field(
        "auto",
        description="Whether it calls functions: never, as it likes, at least one, or the one that is named.",
    )
    parallel_tool_calls: bool = Field(True, description="False: the first call is the last.")
    logprobs: bool = Field(False, description="With log-probabilities of the tokens.")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description="With those of so many of the likeliest tokens."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs may be given only where logprobs is true", param="top_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _tool_choice_is_there(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools: two functions have the same name", param="tools")
        if (
            isinstance(self.tool_choice, NamedTool)
            and (name := self.tool_choice.function.name) not in names
        ):
            raise InvalidRequestError(
                f"tool_choice: there is no function {name!r} in tools", param="tool_choice"
            )
        if self.tool_choice == "required" and not names:
            raise InvalidRequestError(
                "tool_choice is required, but there are no tools", param="tool_choice"
            )
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def callable_functions(self) -> list[Function]:
        """Those that the answer may call: the one that tool_choice names, or all."""
        functions = [tool.function for tool in self.usable_tools]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [function for function in functions if function.name == name]
        return functions

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def most_calls(self) -> int | None:
        """In each choice; None is any number."""
        return (
            1 if isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls else None
        )
