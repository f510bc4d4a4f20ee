"""The responses of Anthropic's routes, as types for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Json

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


class Stop(ResponseBody):
    """The reason of an answer's end."""

    stop_reason: StopReason | None = Field(description="null only where a stream begins.")
    stop_sequence: str | None


class AnthropicMessage(Stop):
    """The response of /v1/messages."""

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


class MessageStart(ResponseBody):
    """The first event."""

    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(ResponseBody):
    """A block begins, without content."""

    type: Literal["content_block_start"]
    index: Size
    content_block: Block


class BlockTextDelta(ResponseBody):
    """New text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseBody):
    """New reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ResponseBody):
    """The signature of reasoning, at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(ResponseBody):
    """A new part of the JSON that is a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ResponseBody):
    """A new part of a block."""

    type: Literal["content_block_delta"]
    index: Size
    delta: Annotated[
        BlockTextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")
    ]


class BlockStop(ResponseBody):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: Size


class MessageDelta(ResponseBody):
    """The end of the answer, and its usage."""

    type: Literal["message_delta"]
    delta: Stop
    usage: AnthropicUsage


class Signal(ResponseBody):
    """The end of the stream, or a sign of life between tokens."""

    type: Literal["message_stop", "ping"]


class MessageEvent(BaseModel):
    """A server-sent event, whose name is the type of its data."""

    data: Json[
        MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | Signal | AnthropicError
    ]
