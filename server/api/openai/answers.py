"""The responses of OpenAI's routes that are no streams, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvasir.server.api.schemas import Logprob, ResponseBody, Size

Finish = Literal["stop", "length", "timeout"]
ChatFinish = Literal["stop", "length", "tool_calls", "timeout"]


class PromptTokensDetails(ResponseBody):
    """A closer look at the prompt's tokens."""

    cached_tokens: Size = Field(description="Prompt tokens found in the prefix cache.")


class CompletionTokensDetails(ResponseBody):
    """A closer look at the new tokens."""

    reasoning_tokens: Size = Field(
        0, description="Tokens up to the end of the reasoning, where the chat template has one."
    )
    accepted_prediction_tokens: Size = Field(
        0, description="Tokens of the answers that their prediction had in the same place."
    )
    rejected_prediction_tokens: Size = Field(
        0, description="Its other tokens, which are not among `completion_tokens`."
    )


class Usage(ResponseBody):
    """Numbers of tokens."""

    prompt_tokens: Size
    completion_tokens: Size
    total_tokens: Size
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Where the chat template has reasoning, or with a prediction."
    )


class _Envelope(ResponseBody):
    id: str
    created: int = Field(description="Unix time.")
    model: str
    system_fingerprint: str = Field(
        description="Of the model's files and the software: seeded answers change only with it."
    )


class CompletionLogprobs(ResponseBody):
    """Four parallel lists, with an item for each token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None
    top_token_ids: list[dict[str, Size] | None] = Field(
        [],
        description="With `return_token_ids`: the ids of the new tokens and of the likeliest; null "
        "for tokens of the prompt.",
    )
    text_offset: list[Size]


class PromptLogprob(ResponseBody):
    """The log-probability of a token in a place of the prompt."""

    logprob: Logprob
    rank: Annotated[int, Field(ge=1)] = Field(description="1 is the likeliest.")
    decoded_token: str


# A place has the prompt's token and the likeliest, by id. The first has none.
PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None], Field(description="Where they were asked for.")
]


TokenIds = Annotated[list[Size], Field(description="With `return_token_ids`.")]


class CompletionChoice(ResponseBody):
    """One continuation of one prompt."""

    index: Size = Field(description="Prompt index times n, plus sample.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs = Field([])
    prompt_token_ids: TokenIds = Field([])
    token_ids: TokenIds = Field([])
    score: float | None = Field(None, description="Of a beam search: see `length_penalty`.")


class Completion(_Envelope):
    """The response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class ChatLogprob(ResponseBody):
    """A token and its log-probability."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None = Field(
        description="The token's text in UTF-8, which may be part of a character; "
        "null for a token that does not show."
    )
    token_id: Size = Field(0, description="With `return_token_ids`.")


class ChatTokenLogprob(ChatLogprob):
    """The same, with the likeliest tokens in its place."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(ResponseBody):
    """The log-probabilities of a message's tokens."""

    content: list[ChatTokenLogprob]


class CalledFunction(ResponseBody):
    """The function that a tool call names."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(ResponseBody):
    """A call of a function by the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseBody):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = Field([])


class ChatChoice(ResponseBody):
    """One of `n` messages."""

    index: Size
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    prompt_token_ids: TokenIds = Field([])
    token_ids: TokenIds = Field([])


class Chat(_Envelope):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = Field([])
