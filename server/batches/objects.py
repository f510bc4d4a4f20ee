"""Files and batches, as OpenAI describes them and as the store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = ("failed", "completed", "expired", "cancelled")


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class File(_Object):
    """A file of requests or of answers."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class Fault(_Object):
    """The reason why a batch failed; most name a line of its file."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


class Faults(_Object):
    """The reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[Fault]


class Counts(_Object):
    """Numbers of requests; failed are those with an answer in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(_Object):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: int = 0


class ReasoningTokens(_Object):
    """New tokens before the answer."""

    reasoning_tokens: int = 0


class BatchUsage(_Object):
    """The tokens of all answers."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = Field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = Field(default_factory=ReasoningTokens)
    total_tokens: int = 0

    def add(self, body: Any) -> None:
        """Add the usage of an answer, in the names of completions, responses or messages."""
        given = body.get("usage") if isinstance(body, Mapping) else None
        if not isinstance(given, Mapping):
            return
        prompt, completion = (
            ("input", "output") if "input_tokens" in given else ("prompt", "completion")
        )
        apart = given.get("cache_read_input_tokens", 0)  # beside Anthropic's input tokens
        self.input_tokens += given.get(f"{prompt}_tokens", 0) + apart
        self.output_tokens += given.get(f"{completion}_tokens", 0)
        self.total_tokens = self.input_tokens + self.output_tokens
        cached = given.get(f"{prompt}_tokens_details") or {}
        reasoning = given.get(f"{completion}_tokens_details") or {}
        thought = reasoning.get("reasoning_tokens", 0) or reasoning.get("thinking_tokens", 0)
        self.input_tokens_details.cached_tokens += cached.get("cached_tokens", 0) + apart
        self.output_tokens_details.reasoning_tokens += thought


class Batch(_Object):
    """A file of requests that are answered one by one. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Field(default_factory=Counts)
    usage: BatchUsage = Field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None

    def enter(self, status: Status, now: float) -> Self:
        """Change to a status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(now))
        return self


class StoredFile(File):
    """A file, with the name of the API key that it belongs to."""

    owner: str


class Upload(_Object):
    """The bytes that are held for a content, which is not yet, or no longer, a file."""

    id: str
    owner: str
    bytes: int = 0
    lease: str = ""  # of the server that receives it; without one the content is to be removed


class StoredBatch(Batch):
    """A batch, with the name of the API key that it belongs to, and the ids of its files to be.

    parts: where parts of its requests begin in the file, if several servers answer them.
    """

    owner: str
    answers: str
    failures: str
    parts: list[int] = []
