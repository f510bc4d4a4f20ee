"""The responses of Anthropic's routes that are no streams, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvasir.server.api.schemas import ResponseBody, Size

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


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


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
    content: list[Block]
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
