"""The responses of /v1/responses that are no streams, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvasir.server.api.openai.answers import ChatTokenLogprob
from kvasir.server.api.schemas import Page, ResponseBody, Size

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseBody):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[ChatTokenLogprob] = Field(description="Empty unless `include` asks for them.")


class ReasoningText(ResponseBody):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageOutput(ResponseBody):
    """A message; once it is complete it has one part."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(ResponseBody):
    """Reasoning; once it is complete it has one part."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]
    encrypted_content: str = Field("", description="Where `include` asks for it.")


class CallOutput(ResponseBody):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


OutputItem = Annotated[MessageOutput | ReasoningOutput | CallOutput, Field(discriminator="type")]


class InputTokensDetails(ResponseBody):
    """A closer look at the prompt's tokens."""

    cached_tokens: Size = Field(description="Prompt tokens found in the prefix cache.")
    cache_write_tokens: Literal[0]


class OutputTokensDetails(ResponseBody):
    """A closer look at the new tokens."""

    reasoning_tokens: Size = Field(description="Tokens up to the end of the reasoning.")


class ResponseUsage(ResponseBody):
    """Numbers of tokens."""

    input_tokens: Size
    input_tokens_details: InputTokensDetails
    output_tokens: Size
    output_tokens_details: OutputTokensDetails
    total_tokens: Size


class IncompleteDetails(ResponseBody):
    """The reason why a response is incomplete: a limit of tokens, or of time."""

    reason: Literal["max_output_tokens", "timeout"]


class ResponseFailure(ResponseBody):
    """The error that has ended a stream."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ModelResponse(ResponseBody):
    """The response of /v1/responses. Fields after `usage` are the request's."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time.")
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="null until it has ended.")
    temperature: float
    top_p: float
    instructions: str | None
    previous_response_id: str | None
    store: bool
    max_output_tokens: int | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    top_logprobs: int
    truncation: Literal["disabled"]
    background: Literal[False]
    metadata: dict[str, Any]
    user: str | None


class DeletedResponse(ResponseBody, json_schema_serialization_defaults_required=True):
    """The response to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(Page[dict[str, Any]], json_schema_serialization_defaults_required=True):
    """A page of the conversation before a stored response."""

    data: list[dict[str, Any]] = Field(description="Messages, calls, their outputs, reasoning.")
