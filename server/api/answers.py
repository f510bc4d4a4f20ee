"""What is answered, as types: for the OpenAPI document, and for tests that hold real answers to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]
OpenAIFinish = Literal["stop", "length", "timeout"]
ChatFinish = Literal["stop", "length", "tool_calls", "timeout"]
TGIFinish = Literal["length", "eos_token", "stop_sequence"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None


class Error(Answer):
    """Any error of a route that is not TGI's."""

    error: ErrorDetail


class GenerateError(Answer):
    """An error of TGI's routes."""

    error: str
    error_type: str


class PromptTokensDetails(Answer):
    cached_tokens: Count = Field(description="Prompt tokens that the prefix cache had.")


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None
    text_offset: list[Count]


class CompletionChoice(Answer):
    index: Count = Field(description="Prompt index times n, plus sample.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinish


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix time.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(CompletionChoice):
    finish_reason: OpenAIFinish | None  # type: ignore[assignment]  # until the last


class CompletionChunk(Answer):
    """An event of a stream. With `include_usage`, one more without choices brings the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ChatLogprob(Answer):
    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None = Field(
        description="What it adds to the text in UTF-8, which may be part of a character; null for what does not show."
    )


class ChatTokenLogprob(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class Chat(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    index: Count
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """What is new: the role comes first, a call's id and name where it begins."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Answer):
    """An event of a stream. With `include_usage`, one more without choices brings the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["kvasir"]
    max_model_len: Count


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class PrefillToken(Answer):
    id: Count
    text: str
    logprob: Logprob | None


class Token(Answer):
    id: Count
    text: str
    logprob: Logprob
    special: bool


class StreamDetails(Answer):
    finish_reason: TGIFinish
    generated_tokens: Count
    seed: int | None = Field(description="Null for greedy decoding.")
    input_length: Count


class Details(StreamDetails):
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class Generated(Answer):
    generated_text: str
    details: Details | None = None


class GeneratedToken(Answer):
    """An event of a stream; the last one holds the text and the details."""

    index: Count
    token: Token
    top_tokens: list[Token] | None = None
    generated_text: str | None
    details: StreamDetails | None


class Info(Answer):
    model_id: str
    model_sha: None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation"]
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count
    max_total_tokens: Count
    validation_workers: Count
    max_client_batch_size: Count
    router: Literal["kvasir"]
    version: str
    sha: None
    docker_label: None


class Tokens(Answer):
    prompt: str | None = Field(description="What the template made of messages.")
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None = Field(description="Names in the vocabulary.")
    offsets: list[tuple[Count, Count]] = Field(
        description="Where each token begins and ends, in characters of the prompt. A token that is a part of a "
        "character has all of it; one that the tokenizer adds has nothing."
    )


class SimpleToken(Answer):
    id: Count
    text: str
    start: Count
    stop: Count


class Detokenized(Answer):
    prompt: str


class HeadWeights(Answer):
    layer: Count
    head: Count
    weights: list[list[Annotated[float, Field(ge=0, le=1.001)]]] = Field(
        description="A row for each token, which sums to 1: how much it takes from each token."
    )


class NextToken(Answer):
    token_id: Count
    text: str
    probability: Annotated[float, Field(ge=0, le=1)]


class Explanation(Answer):
    tokens: list[str]
    token_ids: list[Count]
    next_tokens: list[NextToken] = Field(description="The likeliest first.")
    attention: list[HeadWeights] = Field(description="By layer, then by head.")


class ModelFile(Answer):
    name: str
    sha256: str
    bytes: Count | None = Field(description="null for a file that has gone since the start.")


class KVCache(Answer):
    bytes_per_token: Count = Field(description="Of keys and values, in all layers.")
    prompt_bytes_per_token: Count = Field(description="As much again, while a prompt is computed.")
    budget_tokens: Count = Field(description="How many tokens there is memory for.")


class ExplainLimits(Answer):
    max_tokens: Count = Field(description="Of a text.")
    max_weights: Count = Field(
        description="Of an answer: heads of all layers, times tokens squared."
    )


class ModelCard(Answer):
    model: str
    precision: str
    device: str
    parameters: Count
    max_model_len: Count = Field(description="Most tokens of a prompt and its completion, here.")
    max_num_seqs: Count
    kv_cache: KVCache | None = Field(description="null until the model is loaded.")
    has_chat_template: bool
    has_attention: bool = Field(description="Whether `/explain` can answer.")
    explain_limits: ExplainLimits = Field(description="What `/explain` refuses to exceed.")
    config: dict[str, Any] = Field(description="The decoder's shape: its config.json.")
    generation: dict[str, float] = Field(description="How the model advises to sample.")
    verification: dict[str, Any] = Field(
        description="What export measured: ONNX Runtime against PyTorch."
    )
    versions: dict[str, str]
    source: dict[str, Any] = Field(description="What the model was exported from.")
    files: list[ModelFile]


class Health(Answer):
    status: Literal["ok", "unavailable"]


class Version(Answer):
    version: str
    onnxruntime: str | None
    model: str
    precision: str
    device: str
    speculate: bool


class BatchedSequence(Answer):
    request_id: str
    sequence_id: Count
    state: Literal["waiting", "prefilling", "running"]
    row: Count | None
    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count = Field(description="Whose keys and values are there.")
    generated_tokens: Count
    max_tokens: Count
    seconds: float = Field(description="Since it arrived.")


class Batch(Answer):
    max_num_seqs: Count
    sequences: list[BatchedSequence]
