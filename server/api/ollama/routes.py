"""Ollama's routes that run a model: /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

from time import perf_counter

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvasir.server.api.embeddings import figures
from kvasir.server.api.embeddings.requests import PromptFields, check_dimensions
from kvasir.server.api.embeddings.requests import respond as respond_with_vectors
from kvasir.server.api.http.body import TextRoute, VectorRoute
from kvasir.server.api.http.pieces import LazyList
from kvasir.server.api.http.responses import (
    GENERATE_ERRORS,
    STREAMED_LINES,
    models_of,
    served_model,
    state_of,
)
from kvasir.server.api.http.streams import respond
from kvasir.server.api.ollama.formatting import OllamaFormatter, Shown, head, nanoseconds
from kvasir.server.api.ollama.schemas import (
    EmbeddedInputs,
    EmbeddedPrompt,
    EmbedInputBody,
    EmbedPromptBody,
    OllamaBody,
    OllamaChat,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaText,
)
from kvasir.server.api.openai.chat import prepare
from kvasir.server.api.openai.chat_schemas import ChatBody
from kvasir.server.api.openai.completions import prepare_text
from kvasir.server.api.openai.formatting import JSON
from kvasir.server.api.openai.schemas import CompletionsBody
from kvasir.server.api.structured import naming
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.text.answer import AnswerParser

router = APIRouter(route_class=TextRoute)
vector_router = APIRouter(route_class=VectorRoute)


@router.post("/api/chat", response_model=OllamaChat, responses=STREAMED_LINES)
async def chat(request: Request, body: OllamaChatBody) -> Response:
    """Answer in a conversation, as Ollama does: as a stream, unless `stream` is false."""
    if not body.messages:
        return await _loaded(request, body, "message")
    return await _chat(request, body, body.messages, "message")


@router.post("/api/generate", response_model=OllamaText, responses=STREAMED_LINES)
async def generate(request: Request, body: OllamaGenerateBody) -> Response:
    """Continue a text, as Ollama does: as a stream, unless `stream` is false."""
    if not body.prompt:
        return await _loaded(request, body, "response")
    served = served_model(request)
    if served.chat is not None and not (body.raw or body.suffix):
        told = [("system", body.system), ("user", body.prompt)]
        given = [{"role": role, "content": text} for role, text in told if text]
        messages = [OllamaMessage.model_validate(one) for one in given]
        return await _chat(request, body, messages, "response")
    for name in ("system", "think"):
        if getattr(body, name):
            message = (
                f"{name} needs the model's chat template, which this text has not; leave it out"
            )
            raise InvalidRequestError(message, param=name)
    text = {"prompt": body.prompt, "suffix": body.suffix, "max_tokens": -1} | body.openai_fields()
    text["logprobs"] = body.top_logprobs if body.logprobs else None
    wanted, _ = await prepare_text(request, CompletionsBody.model_validate(text))
    return _respond(request, body, "response", wanted, AnswerParser(None, None))


async def _chat(
    request: Request, body: OllamaBody, messages: list[OllamaMessage], shown: Shown
) -> Response:
    served, state = served_model(request), state_of(request.scope)
    if body.think and (served.chat is None or served.chat.reasoning is None):
        message = f"think: the model {served.name!r} does not reason; leave it out"
        raise InvalidRequestError(message, param="think")

    def work() -> ChatBody:
        fields = body.openai_fields()
        fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
        if isinstance(body, OllamaChatBody):
            fields["tools"] = [tool.given for tool in body.tools]
        if body.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
        if isinstance(body.think, str):
            fields["reasoning_effort"] = body.think
        return ChatBody.model_validate({"messages": _openai_messages(messages)} | fields)

    wanted, form = await prepare(request, await served.text_worker.call(state.body_size, work))
    return _respond(request, body, shown, wanted, form.parser())


def _openai_messages(messages: list[OllamaMessage]) -> list[JSON]:
    """Return messages in OpenAI's form, whose calls and results of tools have ids.

    Some templates want them, but Ollama's clients drop them. A result is that of the last message's
    first unanswered call of its name, or of any.
    """
    told, unanswered = list[JSON](), dict[str, str]()  # the functions' names by the calls' ids
    for place, message in enumerate(messages):
        given = message.model_dump(exclude_none=True, exclude={"images", "tool_name"})
        if message.role == "assistant":
            unanswered.clear()
        for index, call in enumerate(given.get("tool_calls", ())):
            called = call.setdefault("id", f"call_{place}_{index}")
            unanswered[called] = call["function"]["name"]
        if message.role == "tool":
            if message.tool_name is not None:
                given.setdefault("name", message.tool_name)
            of_name = (called for called, name in unanswered.items() if name == message.tool_name)
            first = next(of_name, next(iter(unanswered), None))
            answered = given.get("tool_call_id") or first
            if answered is not None:
                given["tool_call_id"] = answered
                unanswered.pop(answered, None)
        told.append(given)
    return told


def _respond(
    request: Request,
    body: OllamaBody,
    shown: Shown,
    wanted: CompletionRequest,
    parser: AnswerParser,
) -> Response:
    arrived = state_of(request.scope).arrived
    formatter = OllamaFormatter(served_model(request), body, shown, parser, arrived)
    return respond(request, naming(wanted, "format"), formatter, stream=body.stream)


async def _loaded(request: Request, body: OllamaBody, shown: Shown) -> Response:
    """Return the answer to a request without a text, by which clients load or unload a model."""
    served, loader = served_model(request), models_of(request.scope).loader
    name = state_of(request.scope).model  # an adapter's is that of its model
    if is_unloaded := not body.wants_model and name in loader.names:
        await loader.unload(name)
    else:
        served.admission.check_open()
    text = {"role": "assistant", "content": ""} if shown == "message" else ""
    end = {"done": True, "done_reason": "unload" if is_unloaded else "load"}
    return JSONResponse(head(served, body.model) | {shown: text} | end)


@vector_router.post("/api/embed", response_model=EmbeddedInputs, responses=GENERATE_ERRORS)
async def embed(request: Request, body: EmbedInputBody) -> Response:
    """Return a vector of length 1 for each text, as Ollama does."""
    served, n = served_model(request), body.dimensions
    check_dimensions(served, n, "dimensions")
    texts = [body.input] if isinstance(body.input, str) else body.input
    name, arrived = body.model or served.name, state_of(request.scope).arrived

    def show(vectors: list[Floats], n_tokens: int) -> JSON:
        return {
            "model": name,
            "embeddings": LazyList(vectors, lambda vector: figures.unit(vector[:n]).tolist()),
            "total_duration": nanoseconds(arrived, perf_counter()),
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }

    fields = PromptFields.model_validate({"truncate": body.truncate})
    return await respond_with_vectors(request, fields, texts, "input", "pooled", show, dimensions=n)


@vector_router.post("/api/embeddings", response_model=EmbeddedPrompt, responses=GENERATE_ERRORS)
async def embed_prompt(request: Request, body: EmbedPromptBody) -> Response:
    """Return the vector of a text, as older versions of Ollama do."""

    def show(vectors: list[Floats], _n_tokens: int) -> JSON:
        return {"embedding": vectors[0].tolist()}

    fields = PromptFields.model_validate({"truncate": True})
    return await respond_with_vectors(request, fields, [body.prompt], "prompt", "pooled", show)
