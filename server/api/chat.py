"""OpenAI's chat: POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from model.chat import ChatTemplateError
from server.api.chat_answer import ChatAnswer
from server.api.chat_schemas import ChatBody
from server.api.openai import check_body, completion_request, respond
from server.api.responses import service_of
from server.api.schemas import parse
from server.api.tool_use import ToolUse
from server.chat_format import ChatFormat
from server.completion import Prompt
from server.errors import InvalidRequestError
from server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    raw = await request.body()
    body = parse(ChatBody, raw)
    check_body(service, body, 1)
    if service.chat is None:
        raise InvalidRequestError(
            "this model has no chat template: export a checkpoint that brings chat_template.jinja, "
            "or send the text itself to /v1/completions"
        )
    tools = ToolUse.of(body, service.chat, service)
    prompt = await _prompt(service, service.chat, body, len(raw))
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
    return await respond(request, wanted, ChatAnswer(service, body, request.state.request_id, tools))


async def _prompt(service: Service, chat: ChatFormat, body: ChatBody, size: int) -> Prompt:
    """The template writes special tokens such as BOS itself."""
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    render = partial(
        chat.render,
        [message.for_template() for message in body.messages],
        tools=[tool.given for tool in body.usable_tools] or None,
        add_generation_prompt=begins,
        continue_final_message=body.continue_final_message,
        **body.chat_template_kwargs,
    )
    try:
        text = await service.aside(size, render)
    except ChatTemplateError as error:
        raise InvalidRequestError(f"messages: {error}", param="messages") from None
    return await service.prompt(text, keep_last=body.truncate_prompt_tokens, add_special_tokens=False)
