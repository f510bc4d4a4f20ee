"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the whole answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from kvasir.server.api import schemas
from kvasir.server.api.openai.schemas import Part, TextPart
from kvasir.server.api.openai.tool_schemas import ObjectSchema
from kvasir.server.api.schemas import Items, RequestBody, ResponseBody, Size


class InputToolUseBlock(Part):
    """An earlier call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]


class InputThinkingBlock(Part):
    """Earlier reasoning of the assistant, for templates that show it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Reasoning of another server, which is ignored."""

    type: Literal["redacted_thinking"]


def _as_blocks(value: object) -> object:
    """Return content as a list of blocks, each of a type that is read."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string, or a list of blocks")
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if not (isinstance(kind, str) and kind in _BLOCKS):
            raise ValueError(
                f"has a block of type {kind!r}, but only these are read: {', '.join(_BLOCKS)}"
            )
    return value


Texts = Annotated[
    Items[TextPart], BeforeValidator(_as_blocks, json_schema_input_type=str | Items[TextPart])
]


class ToolResultBlock(Part):
    """The result of a tool call. is_error: the call has failed, which the text then begins with."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts = Field(default_factory=list)
    is_error: bool = False

    @property
    def text(self) -> str:
        """The result as one text."""
        text = "\n".join(part.text for part in self.content)
        return f"Error: {text}" if self.is_error else text


_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    TextPart | InputToolUseBlock | ToolResultBlock | InputThinkingBlock | RedactedThinkingBlock,
    Discriminator("type"),
]


class InputMessage(Part):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Items[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | Items[Block])
    ]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for block in self.content:
            owner = "user" if isinstance(block, ToolResultBlock) else "assistant"
            if not isinstance(block, TextPart) and self.role != owner:
                raise ValueError(
                    f"a block of type {block.type} belongs to the role {owner}, not {self.role}"
                )
        return self


def _check_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(
            f"a tool of type {kind!r} is not served; give a tool with input_schema, of type custom"
        )
    return value


class AnthropicTool(Part):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: ObjectSchema = Field(description="JSON schema of its arguments.")
    strict: bool = Field(False, description="Hold optional calls to the schema too.")


class ToolChoice(Part):
    """The choice of tools: `auto` allows calls; `any`, or `tool` with a name, demands one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool, for type `tool`.")
    disable_parallel_tool_use: bool = Field(False, description="The first call is the last.")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is None) is (self.type == "tool"):
            raise ValueError("name is given with type tool, and only then")
        return self


class Thinking(Part):
    """The switch of reasoning in the chat template; `adaptive` leaves it as it is.

    budget_tokens: the template's `thinking_budget`.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: schemas.Count | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(RequestBody):
    """A JSON schema that the text follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """The effort, which is the template's `reasoning_effort`, and the form of the text."""

    effort: schemas.Effort | None = None
    format: OutputFormat | None = None


def _check_edit(kind: str) -> str:
    if not kind.startswith("clear_thinking_"):
        raise ValueError(f"{kind!r} is not served; leave it out, and shorten the conversation")
    return kind


class Edit(Part):
    """A change to the conversation: only of past reasoning, which the template shows or drops."""

    type: Annotated[
        str, AfterValidator(_check_edit), Field(json_schema_extra={"pattern": "^clear_thinking_"})
    ]


class ContextManagement(RequestBody):
    """Changes to the conversation before it reaches the model."""

    edits: Items[Edit] = Field(default_factory=list)


class CountTokensBody(RequestBody):
    """The body of POST /v1/messages/count_tokens."""

    model: schemas.ModelName = None
    messages: Items[InputMessage] = Field(
        min_length=1, description="The conversation. A last turn of the assistant is continued."
    )
    system: Texts = Field(default_factory=list, description="The system prompt.")
    tools: Items[Annotated[AnthropicTool, BeforeValidator(_check_tool)]] = Field(
        default_factory=list, description="Tools to call."
    )
    tool_choice: ToolChoice | None = Field(None, description="Default: `auto`.")
    thinking: Thinking | None = Field(None, description="Default: as the template has it.")
    output_config: OutputConfig | None = Field(None, description="`effort` and `format`.")
    context_management: ContextManagement | None = Field(
        None, description="`clear_thinking_…` has no effect; other edits are refused."
    )
    cache_control: dict[str, Any] | None = Field(
        None, description="No effect: prompts with the same beginning share it by themselves."
    )
    speed: Literal["standard"] = Field("standard", description="No effect.")


class MessagesBody(CountTokensBody, schemas.SamplingFields):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=1, le=2**31 - 1, description="Maximum number of new tokens, if the context has room."
    )
    stop: schemas.Stops = Field(
        [], alias="stop_sequences", description="Strings that end the text, and are no part of it."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    service_tier: Literal["auto", "standard_only"] = Field("auto", description="No effect.")


StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class TextBlock(ResponseBody):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseBody):
    """Reasoning before the text."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="No proof: reasoning is not checked when it comes back.")


class ToolUseBlock(ResponseBody):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class AnthropicTokensDetails(ResponseBody):
    """A closer look at the new tokens."""

    thinking_tokens: Size = Field(description="Tokens up to the end of the reasoning.")


class AnthropicUsage(ResponseBody):
    """Numbers of tokens."""

    input_tokens: Size = Field(description="Prompt tokens that were computed.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Size = Field(description="Prompt tokens found in the prefix cache.")
    output_tokens: Size
    output_tokens_details: AnthropicTokensDetails | None = Field(
        None, description="Where the model's chat template has reasoning."
    )


class AnthropicMessage(ResponseBody):
    """The response of /v1/messages."""

    stop_reason: StopReason | None = Field(description="null only where a stream begins.")
    stop_sequence: str | None
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    usage: AnthropicUsage


class TokenCount(ResponseBody):
    """The response of /v1/messages/count_tokens."""

    input_tokens: Size


class AnthropicErrorDetail(ResponseBody):
    """The cause of an error."""

    type: str
    message: str


class AnthropicError(ResponseBody):
    """An error of Anthropic's routes; in a stream it is the last event."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
