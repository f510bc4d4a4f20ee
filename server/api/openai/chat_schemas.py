"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kvasir.server.api.http.body import check_amount
from kvasir.server.api.openai.schemas import (
    OpenAIBody,
    Part,
    TemplateVariables,
    TextPart,
    check_content,
)
from kvasir.server.api.openai.tool_schemas import (
    AllowedTools,
    Function,
    NamedTool,
    Tool,
    ToolChoice,
    check_tool_choice,
)
from kvasir.server.api.schemas import (
    AddSpecialTokens,
    Effort,
    Items,
    RequestBody,
    TopLogprobs,
)
from kvasir.server.errors import InvalidRequestError
from kvasir.server.text.chat_format import REASONING_NAMES

# The body has fields for these variables of the template.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_NEVER_ASSISTANT = frozenset({"system", "developer", "user", "tool"})


class PastFunction(Part):
    """The function that an earlier call named."""

    name: str
    arguments: str | dict[str, Any] = Field(description="JSON, in a string or not.")


class PastCall(Part):
    """An earlier tool call of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: PastFunction


class Message(Part):
    """A message. `reasoning_content`, under any of its names, is for templates that show it."""

    role: str = Field(
        min_length=1,
        max_length=64,
        description="`system`, `developer`, `user`, `assistant`, `tool`, or one that the chat "
        "template names.",
    )
    content: Annotated[Items[TextPart] | str | None, BeforeValidator(check_content)] = None
    name: str | None = None
    tool_calls: Items[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing; only the role assistant may go without")
        if self.role in _NEVER_ASSISTANT:
            for name in ("tool_calls", *REASONING_NAMES):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to the role assistant, not {self.role}")
        self.tool_calls = self.tool_calls or None
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        return joined(self.content)


def joined(content: list[TextPart] | str | None) -> str:
    """Return content as one text."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class PredictedOutput(RequestBody):
    """Text that the answer is likely to have, such as a file that it changes a little."""

    type: Literal["content"]
    content: Annotated[Items[TextPart] | str, BeforeValidator(check_content)]


class Conversation(RequestBody):
    """The variables of the model's chat template."""

    messages: Items[Message] = Field(min_length=1, description="The conversation.")
    tools: Items[Tool] = Field(
        default_factory=list, description="Functions to call, given to the template as written."
    )
    chat_template_kwargs: TemplateVariables
    reasoning_effort: Effort | None = Field(
        None,
        description="Variable for the template, such as `low`. `none` also sets `enable_thinking` "
        "to false.",
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
        calls = (call for message in self.messages for call in message.tool_calls or ())
        written = (call.function.arguments for call in calls)
        check_amount(",".join(text for text in written if isinstance(text, str)).encode())
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

    @property
    def variables(self) -> dict[str, Any]:
        """The template's variables, beside the messages and tools."""
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return effort | self.chat_template_kwargs


class ChatBody(OpenAIBody, Conversation):
    """The body of POST /v1/chat/completions."""

    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(check_tool_choice, json_schema_input_type=ToolChoice | Literal["any"]),
    ] = Field(
        "auto",
        description="Call no function, any, at least one (`required` or `any`), the one named, or "
        "some of `allowed_tools`.",
    )
    parallel_tool_calls: bool = Field(True, description="False: the first call is the last.")
    logprobs: bool = Field(False, description="Return log-probabilities of the tokens.")
    top_logprobs: TopLogprobs = 0
    prediction: PredictedOutput | None = Field(
        None,
        description="Text that the answer is likely to have; it saves time where drafts are on, "
        "and changes nothing else.",
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
        if unknown := (self.allowed_names or set()) - set(names):
            raise InvalidRequestError(
                f"tool_choice: there is no function {min(unknown)!r} in tools", param="tool_choice"
            )
        if self.must_call and not names:
            raise InvalidRequestError(
                "tool_choice is required, but there are no tools", param="tool_choice"
            )
        if self.tool_choice == "none":
            self.tools = []  # so the template shows none
        return self

    @property
    def functions(self) -> list[Function]:
        """The functions that may be called."""
        allowed = self.allowed_names
        functions = [tool.function for tool in self.tools]
        return [function for function in functions if allowed is None or function.name in allowed]

    @property
    def holds_calls(self) -> bool:
        """True if calls, where the model makes any, must be valid."""
        return self.allowed_names is not None or any(f.strict for f in self.functions)

    @property
    def must_call(self) -> bool:
        """True if `tool_choice` asks for a call."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in ("none", "auto")

    @property
    def allowed_names(self) -> set[str] | None:
        """The functions to which `tool_choice` limits calls; None if it does not."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedTools):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return None
