"""The bodies of Ollama's routes, and the answers that are no streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvasir.server.api import schemas
from kvasir.server.api.openai.answers import ChatTokenLogprob
from kvasir.server.api.openai.chat_schemas import Message
from kvasir.server.api.openai.tool_schemas import Tool
from kvasir.server.api.schemas import Items, RequestBody, ResponseBody, Size
from kvasir.server.setting_values import seconds_of

Think = bool | Literal["low", "medium", "high"]


class OllamaOptions(schemas.SamplingFields):
    """The `options` of a request. Those that a model or a machine has once are hints."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] = Field(
        -1, description="Maximum number of new tokens; -1, -2: as many as fit."
    )


_KeepAlive = Annotated[
    Annotated[
        float,
        Field(allow_inf_nan=True),  # for ever
        BeforeValidator(seconds_of, json_schema_input_type=float | str),
    ]
    | None,
    Field(
        description="Time for which a model of the setting `models_dir` stays loaded afterwards: "
        "seconds, or as `5m`; 0 unloads it, -1 keeps it. Others always stay. Default: the setting."
    ),
]


class OllamaBody(RequestBody):
    """The fields of POST /api/chat and /api/generate."""

    model: schemas.ModelName = None
    keep_alive: _KeepAlive = None
    stream: bool = Field(True, description="Answer with a line of JSON for each part.")
    format: Literal["", "json"] | dict[str, Any] = Field(
        "", description="`json`, or a JSON schema that the text follows."
    )
    think: Think | None = Field(
        None,
        description="Reason before the answer, of models that can; a word is the template's "
        "`reasoning_effort`. Default: the chat template's.",
    )
    options: OllamaOptions = Field(
        default_factory=lambda: OllamaOptions.model_validate({}), description="See below."
    )
    truncate: bool = Field(True, description="No effect: a prompt that does not fit is a 400.")
    shift: bool = Field(True, description="No effect, as of `truncate`.")
    logprobs: bool = Field(False, description="Return log-probabilities of the tokens.")
    top_logprobs: schemas.TopLogprobs = 0

    @property
    def wants_model(self) -> bool:
        """False for a request that only unloads its model: without a text, and `keep_alive` 0."""
        text = getattr(self, "messages", None) or getattr(self, "prompt", None)
        return self.keep_alive != 0 or bool(text)

    def openai_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's bodies that ask for the same."""
        options = self.options
        given = options.model_fields_set & schemas.SamplingFields.model_fields.keys()
        fields = {name: getattr(options, name) for name in given}
        if options.num_predict >= 0:
            fields["max_tokens"] = options.num_predict
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["json_schema"] = self.format
        return fields


def _refuse_images(images: list[str]) -> list[str]:
    if images:
        raise ValueError("the model reads text only; leave them out")
    return images


class OllamaMessage(Message):
    """A message. A tool's result may name its tool."""

    images: Annotated[Items[str], AfterValidator(_refuse_images)] = Field([])
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    """The body of POST /api/chat."""

    messages: Items[OllamaMessage] = Field(
        [], description="The conversation. Without any, the answer says that the model is loaded."
    )
    tools: Items[Tool] = Field([], description="Functions to call, given to the template.")


class OllamaGenerateBody(OllamaBody):
    """The body of POST /api/generate."""

    prompt: str = Field(
        "", description="The text. Without one, the answer says that the model is loaded."
    )
    system: str = Field("", description="The system message before it.")
    suffix: str = Field("", description="The text that follows; see /v1/completions.")
    raw: bool = Field(
        False,
        description="Continue the prompt itself. Default: unless the model has a chat template, in "
        "which it is the user's message.",
    )


class OllamaEncoderBody(RequestBody):
    """The fields of POST /api/embed and /api/embeddings."""

    model: schemas.ModelName = None
    keep_alive: _KeepAlive = None
    options: dict[str, Any] | None = Field(None, description="No effect: none changes a vector.")


class EmbedInputBody(OllamaEncoderBody):
    """The body of POST /api/embed."""

    input: str | Annotated[Items[str], Field(min_length=1)] = Field(
        description="A text, or a list of up to 2,048."
    )
    truncate: bool = Field(True, description="Cut texts of too many tokens; else they are a 400.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep so many numbers of each vector."
    )


class EmbedPromptBody(OllamaEncoderBody):
    """The body of POST /api/embeddings."""

    prompt: str = Field(description="A text.")


class ShowBody(RequestBody):
    """The body of POST /api/show."""

    model: schemas.ModelName = None
    name: str = Field("", description="Another name for `model`.")
    verbose: bool = Field(False, description="Has no effect: all is shown.")

    @model_validator(mode="after")
    def _take_either_name(self) -> Self:
        self.model = self.model or self.name or None
        return self


class OllamaFunction(ResponseBody):
    """The function that the model calls, with its arguments."""

    index: Size
    name: str
    arguments: dict[str, Any]


class OllamaCall(ResponseBody):
    """A call of a tool."""

    id: str
    function: OllamaFunction


class OllamaAnswer(ResponseBody):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class _Done(ResponseBody):
    """The end of an answer. Durations are in nanoseconds."""

    model: str
    created_at: str = Field(description="In RFC 3339.")
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    total_duration: Size | None = Field(None, description="Arrival to the end.")
    load_duration: Size | None = Field(None, description="Arrival to a slot.")
    prompt_eval_count: Size | None = None
    prompt_eval_duration: Size | None = Field(None, description="Slot to the first token.")
    eval_count: Size | None = None
    eval_duration: Size | None = Field(None, description="First token to the end.")
    logprobs: list[ChatTokenLogprob] | None = None


class OllamaChat(_Done):
    """The response of /api/chat that is no stream."""

    message: OllamaAnswer


class OllamaText(_Done):
    """The response of /api/generate that is no stream."""

    response: str
    thinking: str | None = None


class EmbeddedInputs(ResponseBody):
    """The response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: Size
    load_duration: Size
    prompt_eval_count: Size


class EmbeddedPrompt(ResponseBody):
    """The response of /api/embeddings."""

    embedding: list[float]


class OllamaError(ResponseBody):
    """An error of Ollama's routes."""

    error: str
