"""OpenAI's chat: POST /v1/chat/completions, whose messages have reasoning, content and calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.model.template.chat_template import ChatTemplateError
from kvasir.server.api.http.body import TextRoute
from kvasir.server.api.http.pieces import LazyList
from kvasir.server.api.http.responses import STREAMED, served_model, state_of
from kvasir.server.api.http.streams import respond
from kvasir.server.api.openai.answers import Chat
from kvasir.server.api.openai.chat_schemas import ChatBody, Conversation, joined
from kvasir.server.api.openai.formatting import JSON, OpenAIFormatter, join, token_logprobs
from kvasir.server.api.openai.tools import AnswerForm, read
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.errors import ContextLengthError, InvalidRequestError
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.answer import AnswerParser, AnswerPiece, Reasoning
from kvasir.server.text.chat_format import ChatFormat

router = APIRouter(route_class=TextRoute)


@router.post("/v1/chat/completions", response_model=Chat, responses=STREAMED)
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer in a conversation, as OpenAI does."""
    wanted, form = await prepare(request, body)
    formatter = ChatFormatter(served_model(request), body, state_of(request.scope).id, form)
    return respond(request, wanted, formatter, stream=body.stream)


async def prepare(
    request: Request, body: ChatBody, default_max_tokens: int | None = None
) -> tuple[CompletionRequest, AnswerForm]:
    """Return the request for a chat, and the form of its answers. Raises InvalidRequestError.

    default_max_tokens: as RequestOptions has it; None is as many as fit.
    """
    served, state = served_model(request), state_of(request.scope)
    chat, text = await render(request, body)
    form = await served.text_worker.call(
        state.body_size, lambda: AnswerForm.of(body, chat, text, served)
    )
    options = body.options(
        [text],
        served.model_dir.default_sampling,
        default_max_tokens=default_max_tokens or served.builder.max_model_len,
        shows_prompt=body.return_token_ids,
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=form.grammar,
        kept_ids=form.kept_ids,
        begins_text=not body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        prediction=joined(body.prediction.content) if body.prediction else "",
    )
    try:
        return await served.builder.build(options, state), form
    except ContextLengthError as error:
        param = error.param if error.param == "prediction" else "messages"
        raise ContextLengthError(error.message, param=param) from None


async def render(request: Request, conversation: Conversation) -> tuple[ChatFormat, str]:
    """Return the model's chat format, and the text that it makes. Raises InvalidRequestError."""
    served, size = served_model(request), state_of(request.scope).body_size
    chat = served.chat
    if chat is None:
        raise InvalidRequestError(
            "this model has no chat template: export a checkpoint with chat_template.jinja, "
            "or send the text itself to /v1/completions"
        )
    add_generation_prompt = conversation.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not conversation.continue_final_message

    def work() -> str:
        return chat.render(
            [message.model_dump(exclude_none=True) for message in conversation.messages],
            tools=[tool.given for tool in conversation.tools] or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )

    try:
        return chat, await served.text_worker.call(size, work, waits=True)
    except ChatTemplateError as error:
        raise InvalidRequestError(f"messages: {error}", param="messages") from None


class ChatFormatter(OpenAIFormatter):
    """The form of a chat's response."""

    def __init__(
        self, served: ServedModel, body: ChatBody, request_id: str, form: AnswerForm
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(served, body, f"chatcmpl-{request_id}", kind)
        self._form = form
        self._with_logprobs, self._n_top = body.logprobs, body.top_logprobs or 0
        self._has_prediction = body.prediction is not None
        self._hidden_ids = served.special_ids - form.kept_ids
        self._parsers: dict[int, AnswerParser] = {}  # by choice

    def parts(self, delta: Delta) -> Iterator[JSON]:
        """Yield the new parts of a message, the first with the role."""
        index = delta.choice.index
        part: JSON = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        is_first = index not in self._parsers
        if is_first:
            self._parsers[index] = self._form.parser()
            yield part | {"delta": {"role": "assistant", "content": ""}}
        if (answer := read(self._parsers[index], delta, self.completion)) is None:
            return
        pieces, reason = answer
        part["finish_reason"] = reason
        part["delta"] = _changes(pieces)
        part |= (ids := self._token_ids(delta, is_first=is_first))
        if self._with_logprobs and delta.logprobs is not None:
            part["logprobs"] = {"content": [delta.logprobs]}
        if part["delta"] or part["logprobs"] or reason is not None or ids:
            yield part

    def shown(self, part: JSON) -> JSON:
        """Return a part with its tokens and the likeliest in their places."""
        if part["logprobs"] is None:
            return part
        scores: list[TokenLogprobs] = part["logprobs"]["content"]
        content = LazyList(scores, self._entry, 1 + self._n_top)
        return part | {"logprobs": {"content": content}}

    def whole(self) -> JSON:
        """Return the body of a finished chat; its one prompt may have scores."""
        scores = self._prompt_scores.get(0)
        return super().whole() | (
            {} if scores is None else {"prompt_logprobs": self._ranks(scores)}
        )

    def finished(self, choice: JSON) -> JSON:
        """Return a whole choice: a message instead of a delta, with its calls joined."""
        message = {"refusal": None} | choice.pop("delta")
        calls: dict[int, JSON] = {}
        for call in message.pop("tool_calls", ()):
            index = call.pop("index")
            calls[index] = join(calls.get(index), call)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": list(calls.values())}
        if self._with_logprobs and choice["logprobs"] is None:
            choice["logprobs"] = {"content": []}
        return super().finished(choice) | {"message": message}

    def _usage(self, n_generated: int) -> JSON:
        usage, details = super()._usage(n_generated), {}
        if self._form.has_reasoning:
            n_reasoning = sum(parser.n_reasoning for parser in self._parsers.values())
            details["reasoning_tokens"] = n_reasoning
        if self._has_prediction:
            accepted, rejected = self.completion.n_prediction_tokens
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = rejected
        return usage | ({"completion_tokens_details": details} if details else {})

    def _entry(self, scored: TokenLogprobs) -> JSON:
        entry = token_logprobs(self.tokenizer, scored, self._hidden_ids)
        if self._with_token_ids:
            entry["token_id"] = scored.token_id
            for other, (token_id, _) in zip(entry["top_logprobs"], scored.top, strict=True):
                other["token_id"] = token_id
        return entry


def _changes(pieces: list[AnswerPiece]) -> JSON:
    """Return the additions to a message: its reasoning, its content, and its calls by index."""
    changes: JSON = {}
    calls: dict[int, JSON] = {}
    for piece in pieces:
        if isinstance(piece, str):
            join(changes, {"content": piece})
            continue
        if isinstance(piece, Reasoning):
            join(changes, {"reasoning_content": piece.text})
            continue
        call: JSON = {"index": piece.index, "function": {"arguments": piece.arguments}}
        if piece.name is not None:
            call |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            call["function"]["name"] = piece.name
        calls[piece.index] = join(calls.get(piece.index), call)
    return changes | ({"tool_calls": list(calls.values())} if calls else {})
