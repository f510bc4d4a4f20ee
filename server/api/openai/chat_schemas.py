"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator
from pydantic import ValidatorFunctionWrapHandler as Validate
from pydantic_core import from_json

from server.api.openai.schemas import OpenAIBody
from server.api.schemas import AddSpecialTokens, RequestBody
from server.engine.sampling import MAX_LOGPROBS
from server.errors import InvalidRequestError

# The body has fields for these variables of the template.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
# A field that the openai package adds to an answer, and sends back with it.
AnswerOnly = Annotated[Any, Field(exclude=True)]


class TextPart(RequestBody):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _check_content(value: object) -> object:
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
    """The function that an earlier call named."""

    name: str
    arguments: str
    parsed_arguments: AnswerOnly = None

    @field_serializer("arguments")
    def _for_template(self, arguments: str) -> dict[str, Any] | str:
        """Return the mapping that templates expect; arguments that are no object stay as text."""
        with suppress(ValueError):
            values = from_json(arguments.strip() or "{}", allow_inf_nan=False)
            if isinstance(values, dict):
                return values
        return arguments


class PastCall(RequestBody):
    """An earlier tool call of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: PastFunction
    index: AnswerOnly = None


class Message(RequestBody):
    """A message. `reasoning_content`, under any of its names, is for templates that show it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart] | str | None, BeforeValidator(_check_content)] = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    parsed: AnswerOnly = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only a message with tool_calls may go without")
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "thinking"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to the role assistant, not {self.role}")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id belongs to the role tool, not {self.role}")
        self.tool_calls = self.tool_calls or None
        return self


class Function(RequestBody):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of its arguments. Default: it has none."
    )
    strict: bool = Field(False, description="Hold optional calls to the schema too.")

    @field_validator("parameters")
    @classmethod
    def _require_object(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters.get("type", "object") != "object":
            raise ValueError(f"must be a schema of type object, not {parameters['type']!r}")
        return parameters

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; without parameters, of none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(RequestBody):
    """A tool that the model may call; `given` is as the client wrote it, for templates."""

    type: Literal["function"]
    function: Function
    _given: dict[str, Any]

    @model_validator(mode="wrap")
    @classmethod
    def _keep_given(cls, values: Any, validate: Validate) -> Self:
        tool: Self = validate(values)
        tool._given = values
        return tool

    @property
    def given(self) -> dict[str, Any]:
        """The tool with its keys in the client's order."""
        return self._given


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


def _check_tool_choice(value: object) -> object:
    if isinstance(value, dict) or value in ("none", "auto", "required"):
        return value
    raise ValueError(
        'must be none, auto, required, or {"type": "function", "function": {"name": …}}'
    )


class Conversation(RequestBody):
    """The variables of the model's chat template."""

    messages: list[Message] = Field(min_length=1, description="The conversation.")
    tools: list[Tool] = Field(
        default_factory=list, description="Functions to call, given to the template as written."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the template, such as `enable_thinking`."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt where the assistant's turn begins. Default: unless continuing.",
    )
    continue_final_message: bool = Field(
        False, description="End the prompt where the last message ends."
    )
    add_special_tokens: AddSpecialTokens = False

    @model_validator(mode="after")
    def _check_template_options(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other; "
                "give one of them",
                param="continue_final_message",
            )
        if reserved := _RESERVED & self.chat_template_kwargs.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {min(reserved)!r}; the body has a field for it",
                param="chat_template_kwargs",
            )
        return self


class ChatBody(OpenAIBody, Conversation):
    """The body of POST /v1/chat/completions."""

    tool_choice: Annotated[
        NamedTool | Literal["none", "auto", "required"], BeforeValidator(_check_tool_choice)
    ] = Field("auto", description="Call no function, any, at least one, or the one named.")
    parallel_tool_calls: bool = Field(True, description="False: the first call is the last.")
    logprobs: bool = Field(False, description="Return log-probabilities of the tokens.")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description="Number of alternatives to return for each token."
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs may be given only where logprobs is true", param="top_logprobs"
            )
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools: two functions have the same name", param="tools")
        if self.named_function is not None and self.named_function not in names:
            raise InvalidRequestError(
                f"tool_choice: there is no function {self.named_function!r} in tools",
                param="tool_choice",
            )
        if self.tool_choice == "required" and not names:
            raise InvalidRequestError(
                "tool_choice is required, but there are no tools", param="tool_choice"
            )
        if self.tool_choice == "none":
            self.tools = []  # so the template shows none
        return self

    @property
    def named_function(self) -> str | None:
        """The function that `tool_choice` names."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
