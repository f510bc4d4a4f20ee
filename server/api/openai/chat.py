"""OpenAI's chat: POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from model.chat_template import ChatTemplateError
from server.api.openai.answers import check_body, completion_request, respond
from server.api.openai.chat_answer import ChatAnswer
from server.api.openai.chat_schemas import ChatBody, Conversation
from server.api.openai.tool_use import ToolUse
from server.api.responses import service_of
from server.api.schemas import parse
from server.errors import ContextLengthError, InvalidRequestError
from server.requests.service import Service
from server.text.chat_format import ChatFormat

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    raw = await request.body()
    body = parse(ChatBody, raw)
    check_body(service, body, 1)
    tools = ToolUse.of(body, chat_format(service), service)
    text = await render(service, body, len(raw))
    try:
        prompt = await service.prompt(
            text, keep_last=body.truncate_prompt_tokens, add_special_tokens=body.add_special_tokens
        )
    except ContextLengthError as error:
        raise ContextLengthError(error.message, param="messages") from None
    wanted = completion_request(
        service,
        body,
        [prompt],
        request.state,
        usual_tokens=service.max_model_len,
        logprobs=body.top_logprobs if body.logprobs else None,
        grammar=tools.grammar,
        kept_ids=tools.kept_ids,
    )
    return await respond(
        request, wanted, ChatAnswer(service, body, request.state.request_id, tools)
    )


def chat_format(service: Service) -> ChatFormat:
    """Raises InvalidRequestError for a model that has no chat template."""
    if service.chat is None:
        raise InvalidRequestError(
            "this model has no chat template: export a checkpoint that brings chat_template.jinja, "
            "or send the text itself to /v1/completions"
        )
    return service.chat


async def render(service: Service, conversation: Conversation, size: int) -> str:
    """The text of a conversation, with special tokens such as BOS; `size`: of its JSON."""
    try:
        return await service.aside(size, partial(_render, chat_format(service), conversation))
    except ChatTemplateError as error:
        raise InvalidRequestError(f"messages: {error}", param="messages") from None


def _render(chat: ChatFormat, conversation: Conversation) -> str:
    begins = conversation.add_generation_prompt
    return chat.render(
        [message.for_template() for message in conversation.messages],
        tools=[tool.given for tool in conversation.usable_tools] or None,
        add_generation_prompt=not conversation.continue_final_message if begins is None else begins,
        continue_final_message=conversation.continue_final_message,
        **conversation.chat_template_kwargs,
    )
